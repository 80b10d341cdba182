"""Tokenizer folders that are missing or damaged, text that is not trusted, odd ids, and threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pluglm.kernel.errors import RequestError, TokenizerError
from pluglm.text.byte_alphabet import byte_of_character
from pluglm.text.tokenizer import Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>"]


def byte_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_of_character(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return backend


def write_folder(folder: Path, **config: object) -> None:
    byte_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_what_a_folder_says_of_itself(tmp_path: Path) -> None:
    write_folder(tmp_path, bos_token={"content": SPECIAL[0]}, eos_token=None, chat_template="hi")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": SPECIAL[1], "bos_token": "no"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, {257})
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (258, {256, 257})
    assert tokenizer.chat_template == "hi"
    assert tokenizers.Tokenizer.from_str(tokenizer.to_json()).encode("hé").ids == tokenizer.encode("hé")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (None, None),
        ([], None),
        ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}], "d"),
        ([{"name": "rag", "template": "r"}], "r"),
    ],
)
def test_forms_of_the_chat_template(entry: object, expected: str | None, tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template=entry)
    assert Tokenizer.from_folder(tmp_path).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(tmp_path).chat_template == "from the file"


DAMAGE = {
    "not json": ("tokenizer.json", "{", "tokenizer.json: not a tokenizer"),
    "not a tokenizer": ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
    "config not json": ("tokenizer_config.json", "{]", "tokenizer_config.json: not JSON"),
    "config too deep": ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: not JSON"),
    "config a list": ("tokenizer_config.json", "[]", "holds a list, not an object"),
    "bos a number": ("tokenizer_config.json", '{"bos_token": 3}', "bos_token is 3"),
    "added tokens": ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder is damaged"),
    "extra tokens": ("tokenizer_config.json", '{"additional_special_tokens": 3}', "must be a list of tokens"),
    "template": ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is neither"),
    "no default": (
        "tokenizer_config.json",
        '{"chat_template": [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]}',
        "none of the chat templates .*'a', 'b'",
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_files_are_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    name, content, message = DAMAGE[damage]
    write_folder(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_what_is_there_but_no_file_is_not_taken_for_absent(name: str, tmp_path: Path) -> None:
    """A cache whose blob is gone leaves a broken link; without the template a chat would silently be another prompt."""
    for place in ("link", "folder"):
        (tmp_path / place).mkdir()
        write_folder(tmp_path / place)
        (tmp_path / place / name).unlink(missing_ok=True)
    (tmp_path / "link" / name).symlink_to(tmp_path / "gone")
    (tmp_path / "folder" / name).mkdir()
    for place in ("link", "folder"):
        with pytest.raises(TokenizerError, match=f"{place}/{name}: a folder, a broken link or no plain file"):
            Tokenizer.from_folder(tmp_path / place)


def test_missing_tokenizers_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no such folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"has no tokenizer.json; copy"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(
        TokenizerError, match=r"tokenizer.model but no tokenizer.json; convert it once with transformers"
    ):
        Tokenizer.from_folder(tmp_path)


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from([*SPECIAL, "<|im_", "end|>"]), st.text(max_size=4)), max_size=8))
def test_untrusted_text_never_becomes_a_control_token(parts: list[str]) -> None:
    tokenizer = Tokenizer(byte_backend(), source="test")
    text = "".join(parts)
    try:
        plain = tokenizer.encode(text, parse_special=False)
    except RequestError:
        assert any(0xD800 <= ord(character) < 0xE000 for character in text)
        return
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_threads_do_not_disturb_one_another() -> None:
    tokenizer = Tokenizer(byte_backend(), source="test")
    with ThreadPoolExecutor(4) as pool:
        flags = [index % 2 == 0 for index in range(400)]
        lengths = list(pool.map(lambda flag: len(tokenizer.encode("<|im_end|>", parse_special=flag)), flags))
    assert lengths == [1 if flag else len("<|im_end|>") for flag in flags]


def test_text_that_cannot_be_spelled_without_a_control_token_is_refused() -> None:
    """A Unigram vocabulary reaches its own control tokens from plain text."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("a", -2.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend, source="test")
    assert tokenizer.encode("a</s>") == [3, 1]
    with pytest.raises(RequestError, match=r"contains '</s>', a control token that test cannot spell"):
        tokenizer.encode("a</s>", parse_special=False)


def test_lone_surrogates_are_a_request_error() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        Tokenizer(byte_backend(), source="test").encode("a\ud800")


@pytest.mark.parametrize("bad", [-1, 2**32, "x", 1.5])
def test_values_that_are_no_ids_are_a_request_error(bad: object) -> None:
    with pytest.raises(RequestError, match="is not a token id; ids are integers from 0 to 257"):
        Tokenizer(byte_backend(), source="test").decode([65, bad])  # type: ignore[list-item]


def test_ids_without_a_token_add_nothing() -> None:
    tokenizer = Tokenizer(byte_backend(), source="test")
    assert tokenizer.decode([65, 40_000, 66]) == "AB"
    assert (tokenizer.token_bytes(40_000), tokenizer.token_text(-1)) == (b"", None)


def test_vocab_size_counts_up_to_the_highest_id() -> None:
    """Holes in the ids are real (reserved rows); an id below vocab_size may have no token."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 5}, merges=[]))
    assert Tokenizer(backend, source="test").vocab_size == 6
