"""Bad words as text: whatever a tokenizer makes of them, they do not come, with a space before them or without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from engine_cases import real_config, require_idle
from tokenizers import decoders, models, pre_tokenizers

from pluglm import Engine, PluglmError, SamplingParams
from pluglm.params import bad_words_ids
from pluglm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine.from_config(real_config(tiny_model)) as engine:
        yield engine


def spelled(runs: Any, tokenizer: Tokenizer) -> list[bytes]:
    return [b"".join(map(tokenizer.token_bytes, run)) for run in runs]


@pytest.mark.parametrize("word", ["cat", "the cat", "ž", "x9", "!", "  two", " cat"])
def test_both_encodings_are_banned(engine: Engine, word: str) -> None:
    """vllm #32557, TensorRT-LLM #15706: " word" was not banned where "word" was."""
    bare = word.removeprefix(" ")
    runs = bad_words_ids((word,), engine.tokenizer)
    assert spelled(runs, engine.tokenizer) == [bare.encode(), f" {bare}".encode()]


def test_words_that_share_a_run_name_it_once(engine: Engine) -> None:
    assert bad_words_ids(("cat", " cat", "cat"), engine.tokenizer) == bad_words_ids(("cat",), engine.tokenizer)


def space_marking() -> Tokenizer:
    """As of models that write every space as a mark, and put one before each text."""
    pieces = ["▁", "▁the", "▁cat", "cat", "c", "a", "t", "<0x0A>", "<0x20>", "<s>"]
    model = models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], 0, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    backend.add_special_tokens([tokenizers.AddedToken("<s>", special=True)])
    return Tokenizer(backend, source="marks")


def test_a_tokenizer_that_puts_a_space_before_every_text() -> None:
    tokenizer = space_marking()
    assert spelled([tokenizer.encode("cat", add_special_tokens=False)], tokenizer) == [b" cat"]  # so it is one
    assert spelled(bad_words_ids(("cat",), tokenizer), tokenizer) == [b"cat", b" cat"]


def drawn(engine: Engine, seed: int, **params: Any) -> Any:
    chosen = SamplingParams(temperature=3.0, max_tokens=60, seed=seed, ignore_eos=True, **params)
    return engine.generate("the cat sat on the mat", chosen)[0]


def test_no_output_holds_one(engine: Engine) -> None:
    """Words that come without the ban; each is the text of a token, so that they do."""
    tokenizer = engine.tokenizer
    texts = {tokenizer.decode([token]).strip() for seed in range(4) for token in drawn(engine, seed).token_ids}
    words = tuple(sorted(one for one in texts if len(one) > 1 and one.isalpha() and one.isascii()))[:6]
    assert len(words) == 6
    before = " ".join(drawn(engine, seed).text for seed in range(4))
    assert all(word in before for word in words)
    banned = set(bad_words_ids(words, tokenizer))
    for seed in range(4):
        output = drawn(engine, seed, bad_words=words)
        ids = output.token_ids
        assert not [run for run in banned for at in range(len(ids)) if tuple(ids[at : at + len(run)]) == run]
    require_idle(engine)


def test_they_join_the_runs_that_are_given_as_ids(engine: Engine) -> None:
    ids = bad_words_ids(("cat", "on"), engine.tokenizer)
    by_ids = drawn(engine, 3, bad_words_ids=((9,), *ids))
    assert drawn(engine, 3, bad_words=("cat", "on"), bad_words_ids=((9,),)).token_ids == by_ids.token_ids


def test_control_tokens_are_text_here(engine: Engine) -> None:
    """No special token may be banned by its spelling: the run is what plain text with these letters is."""
    for token in engine.tokenizer.special_ids:
        runs = bad_words_ids((str(engine.tokenizer.token_text(token)),), engine.tokenizer)
        assert runs
        assert all(token not in run for run in runs)


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in (
        {"bad_words": ("",)},
        {"bad_words": ("\ud800",)},
        {"bad_words": ("a",), "temperature": 0.0, "search": {"width": 2}},
    ):
        with pytest.raises(PluglmError, match=r"^SamplingParams: .*bad_words"):
            SamplingParams(**wrong)  # type: ignore[arg-type]
    small = Tokenizer(tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), source="one letter")
    assert bad_words_ids(("a",), small) == ((0,),)
    with pytest.raises(PluglmError, match="bad_words: 'b' has no tokens; leave it out"):
        bad_words_ids(("b",), small)
