"""Tokens to shown text: the stream's pieces against the full decode cut at the first stop string."""

from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from pluglm.kernel.interfaces.services import TextDelta
from pluglm.text.stop import StopMatcher
from pluglm.text.stream import TextStream
from pluglm.text.tokenizer import Tokenizer


def small_tokenizer() -> Tokenizer:
    pieces = ["▁a", "b", "ab", "▁", "c▁", "<0xE2>", "<0x82>", "<0xAC>", "€b", "ba"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.add_tokens([AddedToken("<end>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend, source="test")


TOKENIZER = small_tokenizer()
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20)
STOPS = st.lists(st.sampled_from(["b", "ba", " a", "€", "€b", "ab ", "<end>", "c b", "�"]), max_size=3)


def ids_of(*pieces: str) -> list[int]:
    return [token_id for piece in pieces if (token_id := TOKENIZER.token_id(piece)) is not None]


@settings(max_examples=300, deadline=None)
@given(ids=IDS, stop=STOPS, include_stop=st.booleans(), skip=st.booleans())
def test_stream_equals_the_whole_text_cut_at_the_stop(
    ids: list[int], stop: list[str], include_stop: bool, skip: bool
) -> None:
    whole = StopMatcher(stop, include_stop=include_stop)
    expected = whole.push(TOKENIZER.decode(ids, skip_special_tokens=skip))[0] + whole.flush()
    stream = TextStream(TOKENIZER, stop=stop, include_stop=include_stop, skip_special_tokens=skip)
    text = "".join(stream.push(token_id).text for token_id in ids) + stream.finish()
    assert (text, stream.stopped) == (expected, whole.matched)


def test_the_token_that_completes_a_stop_is_told() -> None:
    stream = TextStream(TOKENIZER, stop=["€b"])
    deltas = [stream.push(token_id) for token_id in ids_of("ab", "<0xE2>", "<0x82>", "<0xAC>", "ba", "c▁")]
    assert deltas[:4] == [TextDelta("ab", None), *[TextDelta("", None)] * 3]
    assert deltas[4] == TextDelta("", "€b")
    assert deltas[5] == TextDelta("", "€b")
    assert stream.finish() == ""


def test_a_stop_counts_once_its_last_token_comes_after_min_tokens() -> None:
    """As EOS does, which may be token min_tokens + 1 at the earliest."""
    for min_tokens, stopped_by in ((0, 2), (1, 2), (2, 5), (4, 5), (5, None)):
        stream = TextStream(TOKENIZER, stop=["bab"], min_tokens=min_tokens)
        deltas = [stream.push(token_id) for token_id in ids_of("b", "ab", "c▁", "b", "ab")]
        assert next((place for place, one in enumerate(deltas, 1) if one.stopped), None) == stopped_by


def test_a_stop_completed_by_the_held_rest_is_found_at_the_end() -> None:
    stream = TextStream(TOKENIZER, stop=["€"])
    for token_id in ids_of("ab", "<0xE2>", "<0x82>", "<0xAC>"):
        assert stream.push(token_id).stopped is None
    assert stream.finish() == ""
    assert stream.stopped == "€"
