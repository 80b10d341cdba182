"""Streamed text equals the full decode of the tokenizers library, for any ids and any split into pushes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from pluglm.kernel.errors import TokenizerError
from pluglm.text.byte_alphabet import byte_of_character
from pluglm.text.detokenizer import IncrementalDetokenizer
from pluglm.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x8E, 0x89, 0xC3, 0xFF, 0x80)]
PIECES = ["▁", "▁▁", "▁a", "a▁", "b", "▁▁b", "é", "日", "🎉", " ", "  x", "\n", "�", "<0x4", "<0xZZ>", "Ġ"]
SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "byte level": decoders.ByteLevel(),
    "gemma": decoders.Sequence(SENTENCEPIECE),
    "llama": decoders.Sequence([*SENTENCEPIECE, decoders.Strip(" ", 1, 0)]),
    "strip three": decoders.Sequence([*SENTENCEPIECE, decoders.Strip(" ", 3, 0)]),
    "metaspace": decoders.Metaspace(),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "fallback then metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "byte level then strip": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 2, 0)]),
}


def tokenizer_with(decoder: decoders.Decoder) -> Tokenizer:
    """A vocabulary with every awkward piece; the decoder alone decides what ids mean."""
    pieces = dict.fromkeys([*PIECES, *BYTES, *sorted(byte_of_character())])
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.add_tokens([AddedToken("<|end|>", special=True), AddedToken("<tool ▁é>", special=False)])
    backend.decoder = decoder
    return Tokenizer(backend, source="test")


TOKENIZERS = {name: tokenizer_with(decoder) for name, decoder in DECODERS.items()}
VOCABULARY = TOKENIZERS["gemma"]
LIKELY = [VOCABULARY.token_id(piece) for piece in (*PIECES, *BYTES, "<|end|>", "<tool ▁é>", "Ã", "â", "Ĥ", "¬")]
AWKWARD_IDS = st.one_of(
    st.lists(st.integers(0, VOCABULARY.vocab_size + 2), max_size=40),
    st.lists(st.sampled_from([token_id for token_id in LIKELY if token_id is not None]), max_size=25),
)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", sorted(DECODERS))
@settings(max_examples=120, deadline=None)
@given(ids=AWKWARD_IDS, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_streamed_text_equals_full_decode(name: str, skip: bool, ids: list[int], cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    full = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pushed = ""
    for start, end in pairwise([0, *sorted(cuts), len(ids)]):
        pushed += detokenizer.push(ids[start:end])
        assert full.startswith(pushed)
    assert pushed + detokenizer.flush() == full
    assert detokenizer.push(ids) + detokenizer.flush() == full


def test_text_leaves_as_soon_as_it_is_certain() -> None:
    """A euro sign in three tokens: nothing, nothing, the whole sign."""
    tokenizer = TOKENIZERS["byte level"]
    spelled = {byte: character for character, byte in byte_of_character().items()}
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = [tokenizer.token_id(spelled[byte]) for byte in "a€b".encode()]
    assert [detokenizer.push([token_id]) for token_id in ids if token_id is not None] == ["a", "", "", "€", "b"]
    assert detokenizer.flush() == ""


def test_a_byte_fallback_run_leaves_when_it_ends() -> None:
    tokenizer = TOKENIZERS["gemma"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = ["<0xE2>", "<0x82>", "<0xAC>", "b", "<0xE2>"]
    ids = [tokenizer.token_id(piece) for piece in pieces]
    assert [detokenizer.push([token_id]) for token_id in ids if token_id is not None] == ["", "", "", "€b", ""]
    assert detokenizer.flush() == "�"


@pytest.mark.parametrize(
    "decoder",
    [None, decoders.WordPiece(), decoders.CTC(), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])],
    ids=["none", "wordpiece", "ctc", "right strip"],
)
def test_decoders_that_cannot_be_streamed_are_refused(decoder: decoders.Decoder | None) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(TokenizerError, match=r"test: the tokenizer has .* cannot be streamed") as caught:
        IncrementalDetokenizer(Tokenizer(backend, source="test"))
    assert "\n" not in str(caught.value)


@settings(max_examples=120, deadline=None)
@given(ids=AWKWARD_IDS)
@pytest.mark.parametrize("name", ["byte level", "gemma"])
def test_token_bytes_joined_are_the_bytes_of_the_text(name: str, ids: list[int]) -> None:
    """Wherever the joined bytes are UTF-8, and for decoders that drop nothing."""
    tokenizer = TOKENIZERS[name]
    raw = b"".join(map(tokenizer.token_bytes, ids))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in text:
        assert raw == text.encode()
