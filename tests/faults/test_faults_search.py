"""Rule 8 for searches: one that misbehaves fails the requests that it searched for, once, and leaves nothing behind."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, require_idle, write_plugin
from fault_cases import NAMED, Case
from step_cases import Steps

from pluglm import Engine, SamplingParams
from pluglm.kernel.errors import ComponentFailure, RequestError

SEARCHED = SamplingParams(temperature=0, max_tokens=6, n=2, ignore_eos=True, search={})
BASE = """
import time, torch
from pluglm.kernel.errors import ComponentFailure, KVExhausted, RequestError
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.search import Branch, Hypothesis, Search

class Faulty(Search):
    Config = ComponentConfig
    interface_version = 1
    def __init__(self, config, context): pass
    def check(self, options, num_results): return None
    def start(self, options, num_results, max_tokens, ignore_eos): return Walk(num_results, max_tokens)

class Walk:
    '''Three lanes that all stem from the first one, and end after max_tokens.'''
    def __init__(self, n, max_tokens): self.n, self.max_tokens, self.count = n, max_tokens, 0
    def advance(self, logprobs_LV):
        self.count += 1
        return self.spoil([Branch(0, t) for t in (1, 2, 3)] if self.count < self.max_tokens else [])
    def spoil(self, branches): return branches
    def results(self): return self.changed([Hypothesis(token_ids=(1, 2), score=-1.0, stopped=False)] * self.n)
    def changed(self, results): return results
"""
Make = Callable[..., Case]


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def build(body: str, timeout_s: float = 30.0, of: str = "Walk") -> Case:
        """The base with `body` in its walk, or in the search itself."""
        more = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
        source = BASE + more if of == "Walk" else BASE.replace("\nclass Walk", f"{more}\n\nclass Walk")
        search = f"{write_plugin(tmp_path, source)}:Faulty"
        slots = {"kv": {"use": "paged", "block_size": 2}, "engine": {"plugin_timeout_s": timeout_s, "max_num_seqs": 2}}
        engines.append(Engine.from_config(fake_config(tiny_model, tmp_path, search=search, **slots)))
        return Case(engines[-1])

    yield build
    for engine in engines:
        engine.close()


def check(made: Case, *says: str) -> None:
    steps = Steps(made.engine)
    steps.add("bad", [4, 5, 6], SEARCHED)
    steps.add("good", [1, 2], GREEDY)
    steps.finish()
    end = steps.end("bad")
    assert len([one for one in steps.events if one.request_id == "bad"]) == 1
    made.require_bad(([], end), *says)
    assert (end.token_ids, end.metrics.num_output_tokens if end.metrics else None) == ((), 0)
    made.require_good((steps.tokens("good"), steps.end("good")), [1, 2])
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


def test_the_base_is_sound(make: Make) -> None:
    steps = Steps(make("pass").engine)
    steps.add("a", [4, 5, 6], SEARCHED)
    steps.finish()
    assert steps.lane_ends("a") == {0: "length", 1: "length"}
    assert (steps.tokens("a", 0), steps.tokens("a", 1)) == ([1, 2], [1, 2])
    assert steps.end("a").error is None


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("raise ValueError('lost\\nway')", "raised ValueError: lost way"),
        ("raise RequestError('not mine')", "raised not mine"),
        ("raise KVExhausted('no room')", "raised no room"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("return None", "raised TypeError"),
        ("return [3]", "raised AttributeError"),
        ("return [Branch(len(branches), 1)]", "returned Branch(lane=3, token_id=1), of"),
        ("return [Branch(-1, 1)]", "returned Branch(lane=-1, token_id=1), of"),
        ("return [Branch(0, 10**6)]", "returned Branch(lane=0, token_id=1000000), of"),
        ("return [Branch(0, -1)]", "returned Branch(lane=0, token_id=-1), of"),
        ("return [Branch(0, 1.5)]", "raised TypeError"),
        ("return [Branch('0', 1)]", "raised TypeError"),
        ("return [Branch(0, 1)] * 1025", "returned 1025 lanes, a request may have 1024"),
    ],
)
def test_branches(make: Make, act: str, says: str, call: int) -> None:
    """In the first call there is one lane, in the third there are three."""
    check(make(f"def spoil(self, branches):\n    if self.count == {call}: {act}\n    return branches"), NAMED, says)


def test_a_walk_that_never_ends(make: Make) -> None:
    check(make("def spoil(self, branches): return branches or [Branch(0, 1)]"), NAMED, "goes on after 6 tokens")


@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("raise ValueError('no end')", "raised ValueError: no end"),
        ("return None", "raised TypeError"),
        ("return results[1:]", "returned 1 results where 2 were asked"),
        ("return results + results", "returned 4 results where 2 were asked"),
        ("return [()] * 2", "raised AttributeError"),
        ("return [results[0], Hypothesis(token_ids=(), score=0.0, stopped=True)]", "a result of 0 tokens, 1 to 6"),
        ("return [results[0], Hypothesis(token_ids=(1,) * 7, score=0.0, stopped=True)]", "of 7 tokens, 1 to 6"),
        ("return [results[0], Hypothesis(token_ids=(10**6,), score=0.0, stopped=True)]", "token id 1000000, outside"),
        ("return [results[0], Hypothesis(token_ids=(1.5,), score=0.0, stopped=True)]", "raised TypeError"),
    ],
)
def test_results(make: Make, act: str, says: str) -> None:
    check(make(f"def changed(self, results): {act}"), NAMED, says)


@pytest.mark.parametrize("method", ["spoil(self, branches)", "changed(self, results)"])
def test_a_walk_that_hangs(make: Make, method: str) -> None:
    """The next request may start once the abandoned call has come back."""
    made = make(f"def {method}: time.sleep(1.0)", timeout_s=0.3)
    steps = Steps(made.engine)
    steps.add("bad", [4, 5, 6], SEARCHED)
    steps.finish()
    made.require_bad(([], steps.end("bad")), NAMED, "gave no answer within 0.3 s")
    while not made.core.parts.guard.settled:
        time.sleep(0.01)
    steps.step()
    require_idle(made.engine)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        ("def check(self, options, num_results): return 'not today'", RequestError, "not today"),
        (
            "def check(self, options, num_results): raise ValueError('torn')",
            ComponentFailure,
            "raised ValueError: torn",
        ),
        ("def start(self, *arguments): raise ValueError('torn')", ComponentFailure, "raised ValueError: torn"),
        ("def start(self, *arguments): raise RequestError('too wide')", RequestError, "too wide"),
    ],
)
def test_at_the_door(make: Make, body: str, error: type[Exception], says: str) -> None:
    made = make(body, of="Faulty")
    with pytest.raises(error, match=says):
        made.engine.submit({"prompt_token_ids": [1, 2]}, SEARCHED)
    require_idle(made.engine)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])


def test_broken_logits_of_one_lane(make: Make) -> None:
    """The request ends once, though three of its lanes were in the step."""
    made = make("pass")
    runner: Any = made.core.parts.runner
    original = runner.run

    def run(inputs: Any) -> Any:
        logits_RV = original(inputs)
        if len(inputs.segments) == 2 and inputs.segments[0].num_context > 3:
            logits_RV[1] = float("nan")
        return logits_RV

    runner.run = run
    steps = Steps(made.engine)
    steps.add("bad", [4, 5, 6], SEARCHED)
    steps.finish()
    made.require_bad(([], steps.end("bad")), "gave NaN or infinite logits")
    assert len(steps.events) == 1
    require_idle(made.engine)
