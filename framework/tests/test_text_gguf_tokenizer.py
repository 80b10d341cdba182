"""Tokenizers from GGUF key-value pairs: SentencePiece kinds against transformers, word patterns, damaged files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from pluglm.kernel.errors import TokenizerError
from pluglm.text.byte_alphabet import byte_of_character
from pluglm.text.gguf_pre import FAMILIES, PATTERNS
from pluglm.text.gguf_tokenizer import TokenType, tokenizer_from_gguf

FILE = Path("tiny.gguf")
WORDS = (
    *("the", "there", "then", "in", "ing", "sing", "singing", "low", "lower", "lowest", "new", "newer"),
    *("wide", "wider", "café", "naïve", "日本", "日本語", "1", "12", "123"),
)


def text_lines(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    extra = [
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "<s>",
        "</s>",
        "<unk>",
        "[INST]",
        "<0x41>",
        "▁",
        "€",
        "🎉",
        "\x00",
        "'s",
        "<b>",
    ]
    return ["".join(rng.choice([*WORDS, " ", " ", *extra]) for _ in range(rng.randint(0, 9))) for _ in range(count)]


def learned_pieces() -> list[str]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator([" ".join(WORDS)] * 3, trainers.BpeTrainer(vocab_size=150, min_frequency=1))
    return [piece for piece, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]


def sentencepiece_metadata(architecture: str, **flags: Any) -> dict[str, Any]:
    head = ["<unk>", "<s>", "</s>", "[INST]", "  ", "   ", "\n\n", "<b>"]
    user = [TokenType.USER_DEFINED] * 5
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *user]
    if architecture == "llama":
        head, types = [*head[:4], "▁▁", "▁▁▁", *head[6:]], types
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [piece for piece in learned_pieces() if piece not in head]
    tokens = [*head, *byte_tokens, *pieces]
    scores = [0.0] * len(head) + [0.0] * 256 + [-float(index // 3) for index in range(len(pieces))]
    types = [*types, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [int(kind) for kind in types],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **flags,
    }
    return {"general.architecture": architecture, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}}


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    architecture = metadata["general.architecture"]
    writer = gguf.GGUFWriter(str(path), architecture)
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"{architecture}.{key}", 8)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in metadata.items():
        if key != "general.architecture":
            adders[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": False}, {"add_eos_token": True}], ids=["plain", "no-bos", "eos"]
)
def test_sentencepiece_ids_equal_transformers(architecture: str, flags: dict[str, bool], tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(architecture, **flags)
    write_gguf(tmp_path / "tiny.gguf", metadata)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="tiny.gguf")
    ours = tokenizer_from_gguf(metadata, FILE)
    lines = text_lines(600, seed=3)
    expected = theirs(lines).input_ids
    assert [ours.encode(line) for line in lines] == expected
    decoded = [theirs.decode(ids, skip_special_tokens=True) for ids in expected]
    assert [ours.decode(ids) for ids in expected] == decoded


def test_a_file_without_prefix_space_is_obeyed() -> None:
    """The specification's meaning of add_space_prefix; the text comes back unchanged without a space in front."""
    ours = tokenizer_from_gguf(sentencepiece_metadata("llama", add_space_prefix=False), FILE)
    with_space = tokenizer_from_gguf(sentencepiece_metadata("llama"), FILE)
    assert with_space.encode(" lower")[1:] != ours.encode("lower")[1:]
    assert with_space.encode("lower") == ours.encode(" lower")
    for text in ("lower", " lower", "  x"):
        assert ours.decode(ours.encode(text)) == text


def test_control_tokens_cannot_be_reached_from_plain_text() -> None:
    """A vocabulary in which merges could spell `</s>` piece by piece."""
    metadata = sentencepiece_metadata("llama")
    for piece in ("<", "/", ">", "/s", "/s>"):
        metadata["tokenizer.ggml.tokens"].append(piece)
        metadata["tokenizer.ggml.scores"].append(-0.5)
        metadata["tokenizer.ggml.token_type"].append(int(TokenType.NORMAL))
    ours = tokenizer_from_gguf(metadata, FILE)
    assert 2 in ours.encode("x</s>y")
    plain = ours.encode("x</s>y", add_special_tokens=False, parse_special=False)
    assert not ours.special_ids & set(plain)
    assert ours.decode(plain) == "x</s>y"


def byte_level_metadata(pre: str | None, **flags: Any) -> dict[str, Any]:
    alphabet = sorted(byte_of_character())
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*alphabet, "<|end|>", "<｜bar｜>", "ĠĠ", "aa"],
        "token_type": [1] * 256 + [3, 3, 1, 1],
        "merges": ["Ġ Ġ", "a a"],
        "eos_token_id": 256,
        **flags,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_word_patterns_are_those_of_transformers(name: str) -> None:
    [rule] = [rule for rule, members in FAMILIES.items() if name in members]
    ours = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[rule]), behavior="isolated")
    theirs = pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    samples = ["I'LL go, 12345 Ünï-code!\r\n\n  x", "ABCdef'sX/\n", " \t\n 'd ½ ٣٤٥٦ 日本語テ\u0301 ßẞ ǅ"]
    for line in [*samples, *text_lines(500, seed=8)]:
        assert ours.pre_tokenize_str(line) == theirs.pre_tokenize_str(line)


def test_published_rules_cut_digits_out_before_gpt2s_pattern() -> None:
    """SmolLM2's tokenizer.json: Sequence[Digits(individual_digits=True), ByteLevel]; spaces before digits differ."""
    published = tokenizer_from_gguf(byte_level_metadata("smollm"), FILE, rules="published")
    default = tokenizer_from_gguf(byte_level_metadata("smollm"), FILE)
    double_space = published.token_id("ĠĠ")
    assert double_space in published.encode("a  1")
    assert double_space not in default.encode("a  1")
    assert published.encode("a 1, aa  b") == default.encode("a 1, aa  b")


def test_published_rules_add_bos_for_llama_3_unless_the_file_says_not() -> None:
    metadata = byte_level_metadata("llama-bpe", bos_token_id=257)
    assert tokenizer_from_gguf(metadata, FILE).encode("a") == [tokenizer_from_gguf(metadata, FILE).token_id("a")]
    assert tokenizer_from_gguf(metadata, FILE, rules="published").encode("a")[0] == 257
    stated = byte_level_metadata("llama-bpe", bos_token_id=257, add_bos_token=False)
    assert tokenizer_from_gguf(stated, FILE, rules="published").encode("a")[0] != 257


def test_control_tokens_outside_the_byte_alphabet_are_matched_and_printed() -> None:
    ours = tokenizer_from_gguf(byte_level_metadata(None), FILE)
    ids = ours.encode("a<｜bar｜><|end|>")
    assert ids[1:] == [257, 256]
    assert ours.decode(ids, skip_special_tokens=False) == "a<｜bar｜><|end|>"
    assert ours.token_bytes(257) == "<｜bar｜>".encode()


def test_end_of_turn_ids_count_as_eos() -> None:
    ours = tokenizer_from_gguf(byte_level_metadata("gpt-2", eot_token_id=257), FILE)
    assert ours.eos_token_ids == {256, 257}


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no vocabulary": ({"tokenizer.ggml.model": None}, "holds no tokenizer"),
    "unknown kind": ({"tokenizer.ggml.model": "rwkv"}, "known: gpt2, llama"),
    "unknown pre": ({"tokenizer.ggml.pre": "martian"}, "'martian'.*known: .*smollm"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    "tokens of numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or not"),
    "token twice": ({"tokenizer.ggml.tokens": ["a", "a"]}, "lists a token twice"),
    "types too short": ({"tokenizer.ggml.token_type": [1]}, "1 entries for 260 tokens"),
    "no merges": ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
    "merge of one": ({"tokenizer.ggml.merges": ["ab"]}, "not two pieces"),
    "foreign merge": ({"tokenizer.ggml.merges": ["zz zz"]}, "does not fit its merges"),
    "eos outside": ({"tokenizer.ggml.eos_token_id": 260}, "eos_token_id is 260, outside the 260"),
    "eos negative": ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id is -1"),
    "template": ({"tokenizer.chat_template": 7}, "chat_template is not a string"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_files_are_refused_in_one_line(damage: str) -> None:
    changes, message = DAMAGE[damage]
    with pytest.raises(TokenizerError, match=message) as caught:
        tokenizer_from_gguf(byte_level_metadata("gpt-2") | changes, FILE)
    assert str(caught.value).startswith("tiny.gguf: ")
    assert "\n" not in str(caught.value)


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="rules is 'guess'"):
        tokenizer_from_gguf(byte_level_metadata("gpt-2"), FILE, rules="guess")  # type: ignore[arg-type]


def test_the_byte_alphabet_is_that_of_the_tokenizers_library() -> None:
    table = byte_of_character()
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    for byte in range(0x80):
        assert decoders.ByteLevel().decode([next(c for c, b in table.items() if b == byte)]) == chr(byte)
