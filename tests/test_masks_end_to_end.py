"""A request whose masks leave no token fails alone, and the others get what they get without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import ids, real_config, require_idle

from pluglm import Engine, SamplingParams

MATE = SamplingParams(temperature=0.8, seed=4, max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_request_without_a_token_fails(tiny_model: Path, drafter: Any, temperature: float) -> None:
    """vllm #57986, sglang #27649."""
    masks = {"allowed_token_ids": (5, 7), "bad_words_ids": ((5,), (7, 7, 7))}
    bad = SamplingParams(temperature=temperature, max_tokens=10, ignore_eos=True, **masks)
    with Engine.from_config(real_config(tiny_model, drafter=drafter)) as engine:
        alone = engine.generate([ids(9, 41), ids(60, 61)], MATE)
        first, failed, last = engine.generate([ids(9, 41), ids(7, 7, 7), ids(60, 61)], [MATE, bad, MATE])
        assert failed.finish_reason == "error"
        # the third 7 would complete a bad word; drafts that the failing step had accepted are not committed
        assert list(failed.token_ids) in ([[7, 7]] if drafter is None else [[7], [7, 7]])
        assert "no token is left to draw" in (failed.error or "")
        assert "\n" not in (failed.error or "")
        assert [first.token_ids, last.token_ids] == [one.token_ids for one in alone]
        require_idle(engine)
