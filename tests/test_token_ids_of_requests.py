"""Token ids in a request's sampling params: those outside the vocabulary are refused at the door, by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, require_idle, vocab_size

from pluglm import Engine, SamplingParams
from pluglm.kernel.errors import RequestError

FIELDS: dict[str, Any] = {
    "stop_token_ids": lambda token: (1, token),
    "allowed_token_ids": lambda token: (1, token),
    "bad_words_ids": lambda token: ((1,), (2, token, 3)),
    "logit_bias": lambda token: {1: 1.0, token: -1.0},
    "dry_breaker_ids": lambda token: (1, token),
}


@pytest.mark.parametrize("field", FIELDS)
def test_an_id_outside_the_vocabulary_is_refused_by_name(tiny_model: Path, field: str) -> None:
    """vllm #16529, sglang #7670: a bias for an id outside the vocabulary ended the engine."""
    with Engine(fake_config(tiny_model)) as engine:
        size = vocab_size(engine)
        mate = engine.submit(ids(7, 8, 9), GREEDY)
        for token in (-1, size, 2**63 - 1, -(2**63)):
            params = SamplingParams(**{field: FIELDS[field](token)})
            with pytest.raises(RequestError, match=rf"{field} holds token id {token}, outside 0\.\.{size - 1}$"):
                engine.submit(ids(1, 2), params)
        tokens = [token for event in engine.events(mate) for token in event.token_ids]
        assert tokens == fake_tokens([7, 8, 9], 8, size)
        require_idle(engine)


@pytest.mark.parametrize("field", FIELDS)
def test_what_is_no_token_id_is_refused_when_the_params_are_made(field: str) -> None:
    for wrong in (2**63, 10**5000, 1.5, "x"):
        with pytest.raises(RequestError, match=f"^SamplingParams: {field}"):
            SamplingParams(**{field: FIELDS[field](wrong)})


@pytest.mark.parametrize("field", [*FIELDS, "min_tokens", "dry_multiplier"])
def test_a_search_takes_nothing_that_it_would_ignore(tiny_model: Path, field: str) -> None:
    value = FIELDS[field](2) if field in FIELDS else 1
    params = SamplingParams(temperature=0.0, max_tokens=4, search={"width": 2}, **{field: value})
    with Engine(fake_config(tiny_model, search="beam")) as engine:
        if field == "dry_breaker_ids":  # without a multiplier it says nothing
            assert engine.generate(ids(1, 2), params)[0].finish_reason == "length"
            return
        assert f"a search takes no {field}" in (engine.generate(ids(1, 2), params)[0].error or "")
