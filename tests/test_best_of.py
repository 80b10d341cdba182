"""best_of: the n outputs with the highest mean raw log-probability, by brute force over the fake backend's logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import fake_config, ids, require_idle
from lane_cases import PROMPT, SAMPLED, asking, logits_after

from pluglm import Engine, PluglmError, RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine.from_config(fake_config(tiny_model, search="beam")) as engine:
        yield engine


def best(**changes: Any) -> SamplingParams:
    return SamplingParams.model_validate({**SAMPLED.model_dump(), **changes})


def mean_logprob(prompt: list[int], tokens: list[int]) -> float:
    """float64, of the documented logits: raw, whatever the params do to them."""
    rows = [logits_after(prompt + tokens[:place]).double().log_softmax(0)[token] for place, token in enumerate(tokens)]
    return float(torch.stack(rows).mean())


def ranked(engine: Engine, params: SamplingParams, count: int) -> list[Any]:
    """All that best_of draws, sorted."""
    drawn = engine.generate(ids(*PROMPT), asking(params, n=count, best_of=None, logprobs=1))[0]
    return sorted(drawn.completions, key=lambda one: -mean_logprob(PROMPT, one.token_ids))


@pytest.mark.parametrize("changes", [
    {}, {"temperature": 0.4}, {"top_k": 40, "frequency_penalty": 1.0, "logit_bias": {9: 12.0}},
    {"stop_token_ids": tuple(range(0, 320, 9)), "max_tokens": 30},
])  # fmt: skip
@pytest.mark.parametrize(("count", "best_of"), [(1, 5), (3, 9), (4, 4)])
def test_the_best_come_back_best_first(engine: Engine, changes: dict[str, Any], count: int, best_of: int) -> None:
    output = engine.generate(ids(*PROMPT), best(n=count, best_of=best_of, **changes))[0]
    expected = ranked(engine, best(**changes), best_of)[:count]
    assert [(one.lane, one.token_ids, one.text, one.finish_reason, one.stop) for one in output.completions] == [
        (one.lane, one.token_ids, one.text, one.finish_reason, one.stop) for one in expected
    ]
    assert [one.logprobs for one in output.completions] == [[]] * count  # nobody asked for them
    first = expected[0]
    assert (output.token_ids, output.text, output.stop) == (first.token_ids, first.text, first.stop)
    assert (output.finish_reason, output.logprobs, output.error) == (first.finish_reason, [], None)
    require_idle(engine)


def test_the_mean_is_of_tokens_and_not_of_texts(engine: Engine) -> None:
    """Longer outputs are not worse for being longer: sums would rank others first."""
    params = best(stop_token_ids=tuple(range(0, 320, 9)), max_tokens=30)
    everything = ranked(engine, params, 9)
    sums = [mean_logprob(PROMPT, one.token_ids) * len(one.token_ids) for one in everything]
    assert len({len(one.token_ids) for one in everything}) > 3
    assert sums.index(max(sums)) != 0


def test_logprobs_that_were_asked_for_stay(engine: Engine) -> None:
    output = engine.generate(ids(*PROMPT), best(n=2, best_of=6, logprobs=3))[0]
    for one in output.completions:
        assert [entry.token_id for entry in one.logprobs] == one.token_ids
        assert {len(entry.top) for entry in one.logprobs} == {3}
    assert output.logprobs == output.completions[0].logprobs


def test_equal_outputs_rank_by_lane(engine: Engine) -> None:
    output = engine.generate(ids(*PROMPT), best(temperature=0.0, n=2, best_of=4))[0]
    assert [one.lane for one in output.completions] == [0, 1]
    assert output.completions[0].token_ids == output.completions[1].token_ids


def test_all_that_were_drawn_are_counted(engine: Engine) -> None:
    output = engine.generate(ids(*PROMPT), best(n=1, best_of=5))[0]
    assert output.metrics is not None
    assert output.metrics.num_output_tokens == 5 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 4, "best_of": 3}, "best_of 3 is below n 4"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 3, "logprobs": 1, "logprobs_mode": "processed"}, "best_of ranks by raw log-probabilities"),
        ({"best_of": 2, "temperature": 0.0, "search": {"width": 2}}, "a search ranks its outputs by itself"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best(**changes)


def test_it_cannot_stream(engine: Engine) -> None:
    for call in (engine.stream, engine.submit):
        with pytest.raises(PluglmError, match="best_of ranks whole outputs, so it cannot stream; use generate, or n"):
            call(ids(*PROMPT), best(best_of=2))
    require_idle(engine)


def test_a_request_that_fails_keeps_its_reason(engine: Engine) -> None:
    refused: RequestOutput = engine.generate(
        ids(*PROMPT), best(best_of=3, allowed_token_ids=(5,), bad_words_ids=((5,),))
    )[0]
    assert (refused.finish_reason, len(refused.completions)) == ("error", 1)
    assert "no token is left" in str(refused.error)
