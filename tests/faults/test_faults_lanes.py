"""Rule 8 for requests with several outputs: what fails one lane ends its request once, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import GREEDY, require_idle
from fault_cases import BAD, NAMED
from step_cases import Steps

from pluglm import SamplingParams

THREE = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=3)


def check(made: Any, says: str, params: SamplingParams = THREE) -> Steps:
    """The bad request ends once, with `error` in every lane it got; its mate has its tokens; the next one too."""
    steps = Steps(made.engine)
    made.core.add("bad", [BAD, 2, 3], params)
    made.core.add("good", [1, 2], GREEDY)
    steps.finish()
    end = steps.end("bad")
    made.require_bad(([], end), says)
    assert set(steps.lane_ends("bad").values()) == {"error"}
    made.require_good((steps.tokens("good"), steps.end("good")), [1, 2])
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)
    return steps


def test_one_lane_with_broken_logits(case: Any) -> None:
    """From the step in which all three run; until then each has its first token."""
    body = """
    def spoil(self, logits, bad):
        if len(bad) == 3: logits[bad[1]] = float('nan')
        return logits
    """
    steps = check(case("backend", body), "gave NaN or infinite logits")
    assert set(steps.lane_ends("bad")) == {0, 1, 2}
    assert all(len(steps.tokens("bad", lane)) > 0 for lane in range(3))


def test_kv_that_cannot_fork(case: Any) -> None:
    made = case("kv", "def fork(self, parent_id, child_id): raise ValueError('torn fork')")
    made.core.parts.runner.kv._target.armed = True
    steps = check(made, f"kv {NAMED} raised ValueError: torn fork")
    assert steps.tokens("bad") == []


@pytest.mark.parametrize("kind", ["raises", "refuses"])
def test_a_grammar_that_compiles_for_one_lane_only(case: Any, kind: str) -> None:
    error = {"raises": "ValueError('worn out')", "refuses": "RequestError('worn out')"}[kind]
    body = f"""
    def __init__(self, value):
        self.bad, self.accepted = value == "bad", 0
        count = Matcher.count = getattr(Matcher, "count", 0) + 1
        if count > 1: raise {error}
    """
    made = case("grammar", body)
    grammar = {"kind": "any", "value": "bad"}
    check(made, "worn out", SamplingParams.model_validate({**THREE.model_dump(), "grammar": grammar}))


def test_a_sampler_that_fails_some_lanes(case: Any) -> None:
    body = """
    def spoil(self, drawn, at):
        if len(drawn) > 2: raise ValueError('no dice')
        return drawn
    """
    made = case("sampler", body, engine={"max_num_seqs": 3})
    steps = Steps(made.engine)
    made.core.add("bad", [BAD, 2, 3], THREE)
    steps.finish()
    made.require_bad(([], steps.end("bad")), f"sampler {NAMED} raised ValueError: no dice")
    assert steps.lane_ends("bad") == dict.fromkeys(range(3), "error")
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)
