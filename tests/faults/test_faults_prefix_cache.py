"""Rule 8 and prefix reuse: what a failing step stored is found by nobody later, and a failing cache costs its own."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import GREEDY, fake_tokens, require_idle
from fault_cases import BAD, BASES, NAMED
from step_cases import Steps

PROMPT = [BAD, *range(1, 14)]
CACHES = pytest.mark.parametrize("kv", ["hash_prefix", "radix"])
TORN = """
is_torn = True
def execute(self, model, inputs, attention, kv):
    logits = FakeBackend.execute(self, model, inputs, attention, kv)
    row = 0
    for segment in inputs.segments:
        slots = segment.slots(inputs.block_size)
        if self.is_torn and kv.keys(0)[slots[0], 0, 0] == BAD:
            kv.keys(0)[slots[-1], 0, 0] = 300  # as if a kernel had stored rubbish
            kv.values(0)[slots[-1], 0, 0] = -7
        rows = [r for r in inputs.logit_rows_R.tolist() if 0 <= r - segment.query_start < segment.num_query]
        if (kv.values(0)[slots, 0, 0] == -7).any():  # and attention over it gives what it gives
            logits[row : row + len(rows)] = float('nan')
        row += len(rows)
    return logits
"""


@CACHES
@pytest.mark.parametrize("chunk", [4, 7, 64])
def test_what_nan_came_out_of_is_not_offered_to_others(case: Any, kv: str, chunk: int) -> None:
    """Chunks without logits show nothing, so none of them is offered until finite logits were computed behind it."""
    made = case("backend", TORN, kv={"use": kv, "block_size": 4}, engine={"max_step_tokens": chunk})
    made.require_bad(made.run(("first", PROMPT, GREEDY))["first"], "gave NaN or infinite logits")
    assert made.core.kv.capacity().cached_blocks == 0
    made.core.parts.runner.backend.is_torn = False
    for num_cached in (0, 12 if kv == "hash_prefix" else 13):
        tokens, end = made.run(("again", PROMPT, GREEDY))["again"]
        assert tokens == fake_tokens(PROMPT, 8, made.size)
        assert end.metrics.num_cached_tokens == num_cached
    require_idle(made.engine)


@CACHES
def test_what_was_sound_before_stays_findable(case: Any, kv: str) -> None:
    """The fault hits the request's third output token; its prompt's blocks had been offered by then."""
    made = case("backend", TORN, kv={"use": kv, "block_size": 4})
    backend = made.core.parts.runner.backend
    backend.is_torn = False
    steps = Steps(made.engine)
    made.core.add("first", PROMPT, GREEDY)
    steps.step(2)
    backend.is_torn = True
    steps.finish()
    assert steps.end("first").finish_reason == "error"
    assert len(steps.tokens("first")) == 2
    backend.is_torn = False
    tokens, end = made.run(("again", [*PROMPT, 9], GREEDY))["again"]
    assert tokens == fake_tokens([*PROMPT, 9], 8, made.size)
    assert end.metrics.num_cached_tokens == (12 if kv == "hash_prefix" else 14)
    require_idle(made.engine)


BASE = """
from pluglm_prefix_cache.hash_prefix import HashPrefixKV
class Faulty(HashPrefixKV):
    armed = True
"""


def cached_case(case: Any, monkeypatch: pytest.MonkeyPatch, method: str, **slots: Any) -> Any:
    monkeypatch.setitem(BASES, "kv", BASE)
    return case("kv", method, **slots)


def test_a_cache_that_cannot_publish_fails_those_it_was_to_publish(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the request that has a whole block does; the shorter one never offers anything before it ends."""
    says = "raised ValueError: torn page"
    made = cached_case(case, monkeypatch, "def publish(self, sequence_id, key): raise ValueError('torn page')")
    steps = Steps(made.engine)
    made.core.add("long", list(range(1, 30)), GREEDY)
    made.core.add("short", [1, 2], GREEDY.model_copy(update={"max_tokens": 4}))
    steps.step(3)
    made.require_bad(([], steps.end("long")), f"kv {NAMED} {says}")
    assert steps.running == ["short"]
    steps.finish()
    made.require_bad(([], steps.end("short")), f"kv {NAMED} {says}")  # the last offer is refused as well
    require_idle(made.engine)


def test_a_probe_that_fails_while_a_policy_asks_fails_the_plan(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "raised ValueError: torn index"
    method = "def probe(self, key): raise ValueError('torn index')"
    made = cached_case(case, monkeypatch, method, scheduler="prefix_first")
    made.core.add("a", [1, 2, 3], GREEDY)
    made.core.add("b", [1, 2, 4], GREEDY)
    steps = Steps(made.engine)
    steps.finish()
    for name in ("a", "b"):
        made.require_bad(([], steps.end(name)), f"kv {NAMED} {says}")
    require_idle(made.engine)


@pytest.mark.parametrize("claimed", ["100", "-1", "1.5", "None"])
def test_adopting_more_than_there_is_fails_the_plan_by_the_managers_name(
    case: Any, monkeypatch: pytest.MonkeyPatch, claimed: str
) -> None:
    method = f"""
    def transaction(self):
        inner = super().transaction()
        if self.armed:
            real = inner.acquire
            def acquire(sequence_id, key=None):
                real(sequence_id, key)
                return {claimed}
            inner.acquire = acquire
        return inner
    """
    made = cached_case(case, monkeypatch, method)
    says = f"kv {NAMED} acquire returned {claimed}, 0 to 1 tokens may be adopted"
    made.require_bad(made.run(("bad", [BAD, 2], GREEDY))["bad"], says)
    made.core.parts.runner.kv._target.armed = False
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)
