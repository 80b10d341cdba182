"""Rule 8, slot by slot: a component that raises, hangs or lies fails the requests it touched, and the engine lives on.

Each faulty component misbehaves for requests whose prompt starts with BAD and is sound for all others. The expected
tokens of the others are the documented hash of the fake backend.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, real_config, require_idle, vocab_size, write_plugin

from pluglm import Engine, PluglmError, SamplingParams
from pluglm.kernel.errors import ComponentFailure, PluginError, RequestError

BAD = 13
HEADER = """
import threading, time, numpy as np, torch
from pluglm.kernel.core import PlanItem, StepPlan
from pluglm.kernel.errors import ComponentFailure, KVExhausted, RequestError
from pluglm.kernel.hooks import Hook, hookimpl
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter
from pluglm.kernel.interfaces.grammar import Grammar
from pluglm.kernel.interfaces.scheduler import Reject, Scheduler, Skip, Stop
from pluglm_attention.naive import NaiveAttention
from pluglm_samplers.chain import ChainSampler
from pluglm_schedulers.fcfs import FcfsPolicy
from pluglm.backends.fake import FakeBackend
from pluglm.kernel.planner import PolicyScheduler
from pluglm.kv.paged import PagedKV
BAD = 13
"""
BASES = {
    "drafter": """
class Faulty(Drafter):
    Config = ComponentConfig
    interface_version = 1
    def __init__(self, config, context): self.bad = set()
    def propose(self, requests):
        self.bad |= {one.sequence_id for one in requests if one.token_ids[0] == BAD}
        return [self.one(one) if one.sequence_id in self.bad else [1] for one in requests]
    def one(self, request): return [1]
    def observe(self, sequence_id, num_accepted, token_ids): pass
    def release(self, sequence_id): pass
""",
    "sampler": """
class Faulty(ChainSampler):
    def sample(self, logits_RV, rows):
        drawn = super().sample(logits_RV, rows)
        bad = [i for i, row in enumerate(rows) if row.prompt_token_ids[0] == BAD]
        return self.spoil(drawn, bad[0]) if bad else drawn
    def spoil(self, drawn, at): return drawn
""",
    "scheduler": """
class Faulty(Scheduler):
    Config = ComponentConfig
    interface_version = 1
    def __init__(self, config, context): self.inner = PolicyScheduler(FcfsPolicy(config, context))
    def plan(self, view, budget, kv):
        bad = [one for one in (*view.running, *view.waiting) if one.request_id.startswith("bad")]
        plan = self.inner.plan(view, budget, kv)
        return self.spoil(view, plan, kv, bad[0].sequence_id) if bad else plan
    def spoil(self, view, plan, kv, bad): return plan
""",
    "policy": """
class Faulty(FcfsPolicy):
    pass
""",
    "backend": """
class Faulty(FakeBackend):
    def execute(self, model, inputs, attention, kv):
        bad = [i for i, row in enumerate(inputs.logit_rows_R.tolist()) if self.first(inputs, row, kv) == BAD]
        logits = super().execute(model, inputs, attention, kv)
        return self.spoil(logits, bad) if bad else logits
    def first(self, inputs, row, kv):
        segment = next(s for s in inputs.segments if s.query_start <= row < s.query_start + s.num_query)
        if segment.num_context == 0: return int(inputs.token_ids_T[segment.query_start])
        return int(kv.keys(0)[segment.block_table[0] * inputs.block_size, 0, 0])
    def spoil(self, logits, bad): return logits
""",
    "kv": """
class Faulty(PagedKV):
    armed = False
    def transaction(self):
        inner = super().transaction()
        return Spoilt(inner, self) if self.armed else inner
class Spoilt:
    def __init__(self, inner, manager): self.inner, self.manager = inner, manager
    def __getattr__(self, name): return getattr(self.inner, name)
""",
    "grammar": """
class Faulty(Grammar):
    Config = ComponentConfig
    interface_version = 1
    def __init__(self, config, context): pass
    def compile(self, spec): return Matcher(spec.value)
class Matcher:
    terminated = False
    def __init__(self, value): self.bad, self.accepted = value == "bad", 0
    def fill_mask(self, mask_W): mask_W[:] = -1
    def accept(self, token_id): self.accepted += 1; return True
    def rollback(self, num_tokens): self.accepted -= num_tokens
    def forced(self): return []
""",
}


def faulty(folder: Path, slot: str, body: str) -> str:
    """The base class of a slot with `body` appended to its last class; returns the name to use."""
    source = HEADER + BASES[slot] + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    return f"{write_plugin(folder, source)}:Faulty"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


class Case:
    """An engine with one faulty component, driven through its core so that requests can be named."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.core = engine, engine._core
        self.size = vocab_size(engine)

    def run(self, *requests: tuple[str, list[int], SamplingParams]) -> dict[str, Any]:
        """name -> (tokens, terminal event), all admitted at once; the books are audited after every step."""
        tokens: dict[str, list[int]] = {name: [] for name, _, _ in requests}
        ends: dict[str, Any] = {}
        for name, prompt, params in requests:
            self.core.add(name, prompt, params)
        for _ in range(400):
            if len(ends) == len(requests):
                break
            for event in self.core.step():
                assert event.request_id not in ends
                tokens[event.request_id] += event.token_ids
                if event.finish_reason:
                    ends[event.request_id] = event
            self.core.kv.audit()
        assert ends.keys() == tokens.keys()
        return {name: (tokens[name], ends[name]) for name in tokens}

    def require_good(self, result: Any, prompt: list[int]) -> None:
        assert result[1].error is None
        assert result[0] == fake_tokens(prompt, 8, self.size)

    def require_bad(self, result: Any, *says: str) -> None:
        error = result[1].error
        assert result[1].finish_reason == "error"
        assert "\n" not in error
        for text in says:
            assert text in error

    def check(self, *says: str, mates_live: bool | None = True, params: Any = (GREEDY, GREEDY)) -> None:
        """Good alone; good beside bad; good alone again; nothing left behind."""
        good, bad = params
        self.require_good(self.run(("good", [1, 2], good))["good"], [1, 2])
        both = self.run(("good", [1, 2], good), ("bad", [BAD, 2], bad))
        self.require_bad(both["bad"], *says)
        if mates_live is not None:
            if mates_live:
                self.require_good(both["good"], [1, 2])
            else:
                self.require_bad(both["good"], *says)
        self.require_good(self.run(("good", [1, 2], good))["good"], [1, 2])
        require_idle(self.engine)


@pytest.fixture
def case(tiny_model: Path, folder: Path) -> Iterator[Any]:
    engines: list[Engine] = []

    def make(slot: str, body: str, timeout_s: float = 30.0, **slots: Any) -> Case:
        use = faulty(folder, slot, body)
        filled = {("scheduler" if slot == "policy" else slot): use, **slots}
        filled["engine"] = {"plugin_timeout_s": timeout_s, **slots.get("engine", {})}
        engines.append(Engine.from_config(fake_config(tiny_model, folder, **filled)))
        return Case(engines[-1])

    yield make
    for engine in engines:
        engine.close()


NAMED = "'plugin:Faulty'"


@pytest.mark.parametrize(
    ("body", "says", "mates_live"),
    [
        ("def one(self, request): raise ValueError('bad\\ndraft')", "raised ValueError: bad draft", None),
        ("def one(self, request): raise RequestError('not mine')", "raised not mine", None),
        ("def one(self, request): raise KVExhausted('no room')", "raised no room", None),
        ("def one(self, request): raise ComponentFailure('my part', 'two\\nlines')", "two lines", None),
        ("def one(self, request): raise SystemExit(3)", "raised SystemExit: 3", None),
        ("def one(self, request): return (1, 2)", "proposed tuple", True),
        ("def one(self, request): return None", "proposed NoneType", True),
        ("def one(self, request): return [1] * (request.max_tokens + 1)", "where", True),
        ("def one(self, request): return [10**6]", "token id 1000000, outside 0..", True),
        ("def one(self, request): return [-1]", "token id -1", True),
        ("def one(self, request): return [1.5]", "token id 1.5", True),
        ("def one(self, request): return ['1']", "token id '1'", True),
        ("def propose(self, requests): return []", "one list for each of", None),
        ("def propose(self, requests): return None", "one list for each of", None),
    ],
)
def test_drafter_proposals(case: Any, body: str, says: str, mates_live: bool | None) -> None:
    """One wrong draft fails its own request; a call that fails as a whole fails all that it was asked about."""
    made = case("drafter", body)
    if "def propose" in body:
        made.require_bad(made.run(("bad", [BAD], GREEDY))["bad"], f"drafter {NAMED}", says)
        require_idle(made.engine)
    else:
        made.check(says, "my part" if "my part" in body else f"drafter {NAMED}", mates_live=mates_live)


def test_drafter_that_keeps_its_list_cannot_change_a_draft_later(case: Any) -> None:
    body = """
    kept = []
    def propose(self, requests):
        for one in self.kept: one.clear()
        return [self.kept.append([1]) or self.kept[-1] for _ in requests]
    def observe(self, *args):
        for one in self.kept: one.extend([5] * 400)
    """
    made = case("drafter", body)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


@pytest.mark.parametrize("act", ["raise ValueError('lost')", "time.sleep(1.2)"], ids=["raises", "hangs"])
def test_drafter_observe(case: Any, act: str) -> None:
    made = case("drafter", f"def observe(self, i, n, t):\n    if i in self.bad: {act}", timeout_s=0.3)
    results = made.run(("bad", [BAD], GREEDY))
    made.require_bad(results["bad"], f"drafter {NAMED}", "lost" if "lost" in act else "gave no answer within 0.3 s")
    assert results["bad"][0]
    wait_for_idle(made.engine)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])


def test_drafter_release_that_raises_costs_nobody_anything(case: Any) -> None:
    made = case("drafter", "def release(self, sequence_id): raise ValueError('lost')")
    results = made.run(("bad", [BAD], GREEDY), ("good", [1, 2], GREEDY))
    made.require_good(results["good"], [1, 2])
    made.require_good(results["bad"], [BAD])
    require_idle(made.engine)


def wait_for_idle(engine: Engine) -> None:
    """Steps until the abandoned call has come back and the KV that it could write to is free."""
    for _ in range(300):
        if not engine._core._held_back:
            break
        time.sleep(0.02)
        engine._core.step()
    require_idle(engine)


@pytest.mark.parametrize(
    ("slot", "body"),
    [
        ("drafter", "def one(self, request): time.sleep(1.0); return [1]"),
        ("sampler", "def spoil(self, drawn, at): time.sleep(1.0); return drawn"),
        ("scheduler", "def spoil(self, view, plan, kv, bad): time.sleep(1.0); return plan"),
        ("backend", "def spoil(self, logits, bad): time.sleep(1.0); return logits"),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_a_hang_is_named_and_its_kv_is_kept_out_of_use_until_it_ends(case: Any, slot: str, body: str) -> None:
    """The scheduler hangs with its KV transaction open and uses it when it wakes: it must find it closed."""
    made = case(slot, body, timeout_s=0.3, kv={"use": "paged", "block_size": 2, "num_blocks": 64})
    results = made.run(("bad", [BAD, 2, 3], GREEDY))
    made.require_bad(results["bad"], f"{slot} {NAMED}", "gave no answer within 0.3 s")
    core = made.core
    assert not core.parts.guard.settled
    assert core.kv.capacity().held_blocks == (0 if slot == "scheduler" else 2)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    wait_for_idle(made.engine)
    assert core.parts.guard.settled
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])


@pytest.mark.parametrize(("hang_s", "comes_back"), [(0.9, True), (3.0, False)])
def test_a_request_waits_for_kv_that_an_abandoned_call_holds(case: Any, hang_s: float, comes_back: bool) -> None:
    """The pool is too small for both. It is given as long as the hanging call was, and then the reason is told."""
    body = f"def spoil(self, logits, bad): time.sleep({hang_s}); return logits"
    pool = {"use": "paged", "block_size": 4, "num_blocks": 4}
    made = case("backend", body, timeout_s=0.6 if comes_back else 0.3, kv=pool)
    made.require_bad(made.run(("bad", [BAD, 2, 3, 4, 5], GREEDY))["bad"], "gave no answer")
    result = made.run(("good", [1, 2, 3, 4, 5], GREEDY))["good"]
    if comes_back:
        made.require_good(result, [1, 2, 3, 4, 5])
    else:
        made.require_bad(result, "planned nothing in 100 steps while an abandoned call holds KV")
    wait_for_idle(made.engine)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def spoil(self, drawn, at): raise ValueError('bad row')", "raised ValueError: bad row"),
        ("def spoil(self, drawn, at): raise RequestError('bad params')", "raised bad params"),
        ("def spoil(self, drawn, at): return drawn[:-1]", "tokens for"),
        ("def spoil(self, drawn, at): return [*drawn, 1]", "tokens for"),
        ("def spoil(self, drawn, at): return None", "NoneType"),
        ("def spoil(self, drawn, at): return [10**6 for _ in drawn]", "token id 1000000, outside 0..319"),
        ("def spoil(self, drawn, at): return [-1 for _ in drawn]", "token id -1, outside"),
        ("def spoil(self, drawn, at): return [2.5 for _ in drawn]", "TypeError"),
        ("def spoil(self, drawn, at): return ['a' for _ in drawn]", "TypeError"),
    ],
)
def test_sampler(case: Any, body: str, says: str) -> None:
    """One call draws for all rows, so what it breaks is everyone in that step."""
    case("sampler", body).check(f"sampler {NAMED}", says, mates_live=False)


def test_sampler_that_draws_a_masked_token(case: Any) -> None:
    made = case("sampler", "def spoil(self, drawn, at): return [0 for _ in drawn]", grammar="llguidance")
    params = GREEDY.model_copy(update={"grammar": SamplingParams(grammar={"regex": "[a-z]+"}).grammar})
    result = made.run(("bad", [BAD], params))["bad"]
    made.require_bad(result, f"sampler {NAMED}", "probability zero")
    require_idle(made.engine)


def test_sampler_check_that_raises_ends_the_request_at_the_door(case: Any) -> None:
    made = case("sampler", "def check(self, params): raise ValueError('cannot read')")
    with pytest.raises(ComponentFailure, match="sampler 'plugin:Faulty' raised ValueError: cannot read"):
        made.core.add("bad", [1], GREEDY)
    require_idle(made.engine)


def with_grammar(value: str) -> SamplingParams:
    return SamplingParams.model_validate(
        {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "grammar": {"kind": "any", "value": value}}
    )


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def fill_mask(self, m):\n    m[:] = 0 if self.bad else -1", "the grammar allows no token here"),
        ("def fill_mask(self, m):\n    if self.bad: raise ValueError('no mask')\n    m[:] = -1", "no mask"),
        ("def fill_mask(self, m):\n    m[:] = -1\n    if self.bad: time.sleep(0.6)", "gave no answer within"),
        ("def accept(self, t): return not self.bad", "which its mask allowed"),
        ("def accept(self, t):\n    if self.bad: raise ValueError('no way')\n    return True", "no way"),
        ("@property\ndef terminated(self):\n    if self.bad: raise ValueError('no end')\n    return False", "no end"),
        ("def rollback(self, n):\n    if self.bad: raise ValueError('no return')", "no return"),
    ],
)
def test_a_lying_matcher_fails_its_own_request_only(case: Any, drafter: str | None, body: str, says: str) -> None:
    made = case("grammar", body, timeout_s=0.3 if "sleep" in body else 30.0, drafter=drafter)
    if "rollback" in body and drafter is None:
        body, says = body, "no return"  # a rollback of nothing is asked for after every mask
    good, bad = with_grammar("good"), with_grammar("bad")
    both = made.run(("good", [1, 2], good), ("plain", [4], GREEDY), ("bad", [BAD, BAD, BAD], bad))
    made.require_bad(both["bad"], says, "" if "allows no token" in says else f"grammar {NAMED}")
    made.require_good(both["good"], [1, 2])
    made.require_good(both["plain"], [4])
    wait_for_idle(made.engine)
    made.require_good(made.run(("good", [1, 2], good))["good"], [1, 2])
    require_idle(made.engine)


def raise_this(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("kind", [ValueError, RequestError])
def test_grammar_compile_that_raises_ends_the_request_at_the_door(case: Any, kind: type[Exception]) -> None:
    use = case("grammar", "")
    inner: Any = use.core.parts.grammar
    inner.compile = lambda spec: raise_this(kind("odd\ngrammar" if kind is ValueError else "odd grammar"))
    with pytest.raises(PluglmError, match="odd grammar") as error:
        use.core.add("bad", [1], with_grammar("bad"))
    assert "\n" not in str(error.value)
    output = use.engine.generate(ids(1), with_grammar("bad"))[0]
    assert output.finish_reason == ("error" if kind is ValueError else "refused")
    use.require_good(use.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(use.engine)


PREEMPTS = "StepPlan(plan.items, (bad, bad))"
SCHEDULERS = {
    "raises": ("raise ValueError('no idea')", "raised ValueError: no idea"),
    "raises after taking KV": ("kv.extend(bad, 50); raise ValueError('no idea')", "raised ValueError: no idea"),
    "lets KVExhausted out": ("kv.extend(bad, 10**6)", "tokens need"),
    "none": ("return None", "AttributeError"),
    "tuple": ("return [(bad, 1)]", "AttributeError"),
    "items of another kind": ("return StepPlan(((bad, 1),))", "AttributeError"),
    "acquires twice": ("kv.acquire(bad)", "has a table already"),
}


@pytest.mark.parametrize("fault", SCHEDULERS)
def test_a_plan_that_fails_as_a_whole_fails_all_that_are_live(case: Any, fault: str) -> None:
    act, says = SCHEDULERS[fault]
    case("scheduler", f"def spoil(self, view, plan, kv, bad): {act}").check(says, mates_live=False)


REFUSED = {
    "unknown id": "return StepPlan((*plan.items, PlanItem(999, 1)), plan.preempted)",
    "listed twice": "return StepPlan((*plan.items, *plan.items), plan.preempted)",
    "too many": "return StepPlan((*plan.items, PlanItem(999, 10**6)), plan.preempted)",
    "preempts the unknown": "return StepPlan(plan.items, (*plan.preempted, 999))",
    "preempts the waiting": "return StepPlan(plan.items, tuple(one.sequence_id for one in view.waiting))",
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_items_cost_the_others_nothing(case: Any, fault: str) -> None:
    made = case("scheduler", f"def spoil(self, view, plan, kv, bad): {REFUSED[fault]}")
    both = made.run(("good", [1, 2], GREEDY), ("bad", [BAD], GREEDY))
    made.require_good(both["good"], [1, 2])
    made.require_good(both["bad"], [BAD])
    require_idle(made.engine)


SPOILT_ITEM = {
    "too many tokens": "PlanItem(i.sequence_id, i.num_tokens + 1)",
    "no tokens": "PlanItem(i.sequence_id, 0)",
    "half a token": "PlanItem(i.sequence_id, i.num_tokens - 0.5)",
    "tokens in words": "PlanItem(i.sequence_id, 'one')",
}


@pytest.mark.parametrize("fault", SPOILT_ITEM)
def test_an_item_that_is_always_refused_never_runs_and_the_others_do(case: Any, fault: str) -> None:
    """Its request waits until nothing else is planned, and then the scheduler is called stuck, by name."""
    spoilt = f"{SPOILT_ITEM[fault]} if i.sequence_id == bad else i for i in plan.items"
    made = case("scheduler", f"def spoil(self, view, plan, kv, bad): return StepPlan(tuple({spoilt}), plan.preempted)")
    made.check(f"scheduler {NAMED}", "planned nothing in 100 steps")


UNHELD = {
    "waiting, never acquired": "kv.release(bad)",
    "running, released": "kv.release(bad)",
    "acquired and not extended": "kv.trim(bad, 0)",
}


@pytest.mark.parametrize("fault", UNHELD)
def test_an_item_without_its_kv_fails_by_the_schedulers_name(case: Any, fault: str) -> None:
    when = "view.running and" if "running" in fault else ""
    body = f"""
    def spoil(self, view, plan, kv, bad):
        if {when} any(i.sequence_id == bad for i in plan.items): {UNHELD[fault]}
        return plan
    """
    case("scheduler", body).check(f"scheduler {NAMED}", "extended its KV to 0")


def test_a_preempted_sequence_whose_kv_was_not_released_gives_it_back_all_the_same(case: Any) -> None:
    body = """
    done = 0
    def spoil(self, view, plan, kv, bad):
        if self.done < 3 and any(one.sequence_id == bad for one in view.running):
            self.done += 1
            return StepPlan(plan.items, (bad,))
        return plan
    """
    made = case("scheduler", body)
    both = made.run(("good", [1, 2], GREEDY), ("bad", [BAD], GREEDY))
    made.require_good(both["good"], [1, 2])
    made.require_good(both["bad"], [BAD])
    assert both["bad"][1].metrics.num_preemptions == 3
    require_idle(made.engine)


def test_kv_of_a_waiting_sequence_that_was_never_planned_is_given_back(case: Any) -> None:
    body = """
    def spoil(self, view, plan, kv, bad):
        return StepPlan(tuple(i for i in plan.items if i.sequence_id != bad), plan.preempted)
    """
    made = case("scheduler", body)
    made.core.add("bad", [BAD], GREEDY)
    made.core.step()
    assert made.core.kv.capacity().held_blocks == 1
    made.core.cancel("bad")
    made.core.step()
    require_idle(made.engine)


def test_a_scheduler_that_plans_nothing_for_ever_is_stopped_and_the_next_request_starts_afresh(case: Any) -> None:
    body = """
    patience = 100
    def plan(self, view, budget, kv):
        bad = any(one.request_id == "bad" for one in (*view.running, *view.waiting))
        idle = bad or self.patience > 0
        self.patience = self.patience - 1 if not bad and view.waiting else self.patience
        return StepPlan() if idle else self.inner.plan(view, budget, kv)
    """
    made = case("scheduler", body)
    for _ in range(2):
        made.core.parts.scheduler.patience = 0
        made.require_bad(made.run(("bad", [BAD], GREEDY))["bad"], f"scheduler {NAMED} planned nothing in 100 steps")
        made.core.parts.scheduler.patience = 50  # idle for half the limit: must not be added to what was before
        made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


POLICIES = {
    "order_running": ("def order_running(self, view): raise ValueError('no order')", "no order"),
    "order_waiting": ("def order_waiting(self, view): return None", "TypeError"),
    "share in halves": ("def share(self, view, request, tokens_left): return 0.5", "TypeError"),
    "share raises": ("def share(self, view, request, tokens_left): raise ValueError('no share')", "no share"),
}


@pytest.mark.parametrize("fault", POLICIES)
def test_policy_in_planning(case: Any, fault: str) -> None:
    body, says = POLICIES[fault]
    made = case("policy", body)
    results = made.run(("a", [1, 2], GREEDY), ("b", [3], GREEDY))
    for result in results.values():
        made.require_bad(result, f"scheduler {NAMED}", says)
    require_idle(made.engine)


def test_policy_order_with_doubles_and_strangers_is_harmless(case: Any) -> None:
    body = """
    def order_running(self, view): return [777, *super().order_running(view), *super().order_running(view)]
    def order_waiting(self, view): return [777, *super().order_waiting(view), *super().order_waiting(view)]
    """
    made = case("policy", body, engine={"max_step_tokens": 3})
    results = made.run(("good", [1, 2], GREEDY), ("more", [3, 4, 5, 6], GREEDY))
    made.require_good(results["good"], [1, 2])
    made.require_good(results["more"], [3, 4, 5, 6])
    require_idle(made.engine)


def test_policy_admit(case: Any) -> None:
    body = """
    def admit(self, request, num_waiting):
        if request.request_id == "odd": raise ValueError("who is that")
        return Reject("too busy") if request.request_id == "bad" else super().admit(request, num_waiting)
    """
    made = case("policy", body)
    with pytest.raises(RequestError, match=r"request 'bad': scheduler 'plugin:Faulty' refuses it: too busy"):
        made.core.add("bad", [1], GREEDY)
    with pytest.raises(ComponentFailure, match=r"scheduler 'plugin:Faulty' raised ValueError: who is that"):
        made.core.add("odd", [1], GREEDY)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


def test_policy_on_event_that_raises_costs_nobody_anything(case: Any) -> None:
    made = case("policy", "def on_event(self, event): raise ValueError('lost count')")
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("def extend(self, i, n): raise ValueError('torn page')", "raised ValueError: torn page"),
        ("def commit(self): raise ValueError('torn book')", "raised ValueError: torn book"),
        ("def acquire(self, i): raise OSError('torn cover')", "raised OSError: torn cover"),
    ],
)
def test_kv_changes_that_raise(case: Any, method: str, says: str) -> None:
    made = case("kv", method)
    inner: Any = made.core.parts.runner.kv._target
    inner.armed = True
    made.require_bad(made.run(("bad", [BAD], GREEDY))["bad"], f"kv {NAMED}", says)
    inner.armed = False
    made.core.step()
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


@pytest.mark.parametrize("method", ["commit", "trim", "release"])
def test_kv_that_breaks_in_the_middle_of_a_request_is_tried_again(case: Any, method: str) -> None:
    """Giving back is where a failure could leave a transaction open or lose blocks."""
    made = case("kv", f"def {method}(self, *args): raise ValueError('torn page')", drafter="ngram")
    inner: Any = made.core.parts.runner.kv._target
    made.core.add("bad", [1, 2, 1, 2, 1, 2], GREEDY)
    made.core.step()
    inner.armed = True
    made.core.cancel("bad") if method == "release" else None
    ends = [event for _ in range(30) for event in made.core.step() if event.finish_reason]
    assert len(ends) == 1
    if method != "release":
        made.require_bad(([], ends[0]), f"kv {NAMED}", "torn page")
    inner.armed = False
    made.core.step()
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    if method != "release":  # ValueError of release means that there is nothing to release, so nothing is left to do
        require_idle(made.engine)


def test_kv_tables_that_cannot_be_read(case: Any) -> None:
    made = case("kv", "")
    inner: Any = made.core.parts.runner.kv._target
    table, inner.block_table = inner.block_table, lambda i: (_ for _ in ()).throw(OSError("torn index"))
    made.core.parts.runner.kv.__dict__.pop("block_table", None)
    made.require_bad(made.run(("bad", [BAD], GREEDY))["bad"], f"kv {NAMED} raised OSError: torn index")
    inner.block_table = table
    made.core.parts.runner.kv.__dict__.pop("block_table", None)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


STEP = "model 'llama' with backend 'plugin:Faulty'"


@pytest.mark.parametrize(
    ("body", "says", "mates_live"),
    [
        (
            "def spoil(self, logits, bad): raise RuntimeError('no device')",
            f"backend {NAMED} raised RuntimeError",
            False,
        ),
        ("def spoil(self, logits, bad): logits[bad] = float('nan'); return logits", f"{STEP}", True),
        ("def spoil(self, logits, bad): logits[bad, 7] = float('nan'); return logits", f"{STEP}", True),
        ("def spoil(self, logits, bad): logits[bad, 7] = float('inf'); return logits", f"{STEP}", True),
        ("def spoil(self, logits, bad): logits[bad] = float('-inf'); return logits", f"{STEP}", True),
        ("def spoil(self, logits, bad): return logits[:-1]", f"{STEP}", False),
        ("def spoil(self, logits, bad): return logits[:, :-1]", f"{STEP}", False),
        ("def spoil(self, logits, bad): return logits.double()", f"{STEP}", False),
        ("def spoil(self, logits, bad): return None", f"{STEP}", False),
        ("def spoil(self, logits, bad): return [[0.0]]", f"{STEP}", False),
    ],
)
def test_backend(case: Any, body: str, says: str, mates_live: bool) -> None:
    case("backend", body).check(says, mates_live=mates_live)


def test_a_row_that_verification_never_reaches_may_be_broken(case: Any, folder: Path) -> None:
    """The rows behind a refused draft belong to a text that never was; without a drafter nobody would compute them."""
    body = """
    def spoil(self, logits, bad):
        logits[bad[1:]] = float('nan')
        return logits
    """
    write_plugin(folder, HEADER + BASES["drafter"], "drafts")
    made = case("backend", body, drafter="drafts:Faulty")
    result = made.run(("bad", [BAD, 2], GREEDY))["bad"]
    made.require_good(result, [BAD, 2])
    assert result[1].metrics.num_drafted > 0
    require_idle(made.engine)


HOOKS = ("run_started", "request_admitted", "step_planned", "event_emitted", "step_done", "run_finished")
ARGUMENTS = dict(zip(HOOKS, ("plan", "request", "view, plan", "event", "step, seconds, num_tokens", ""), strict=True))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_is_dropped(tiny_model: Path, folder: Path, hook: str) -> None:
    arguments = f"self, {ARGUMENTS[hook]}".rstrip(", ")
    source = HEADER + (
        "class Faulty(Hook):\n    Config = ComponentConfig\n    interface_version = 1\n"
        "    def __init__(self, config): pass\n"
        f"    @hookimpl\n    def {hook}({arguments}): raise ValueError('lost\\nlog')\n"
    )
    write_plugin(folder, source)
    engine = Engine.from_config(fake_config(tiny_model, folder, hooks=["plugin:Faulty"]))
    output = engine.generate(ids(1, 2), GREEDY)[0]
    engine.close()
    assert output.token_ids == fake_tokens([1, 2], 8, 320)
    failures = engine._core.parts.hooks.failures  # type: ignore[attr-defined]
    assert failures == {"plugin:Faulty": f"{hook}: hook 'plugin:Faulty' raised ValueError: lost log"}
    require_idle(engine)


def test_a_hook_that_hangs_is_dropped(tiny_model: Path, folder: Path) -> None:
    source = HEADER + (
        "class Faulty(Hook):\n    Config = ComponentConfig\n    interface_version = 1\n    go_on = threading.Event()\n"
        "    def __init__(self, config): pass\n"
        "    @hookimpl\n    def step_planned(self, view): self.go_on.wait(10)\n"
    )
    write_plugin(folder, source)
    config = fake_config(tiny_model, folder, hooks=["plugin:Faulty"], engine={"plugin_timeout_s": 0.3})
    with Engine.from_config(config) as engine:
        output = engine.generate(ids(1, 2), GREEDY)[0]
        assert output.token_ids == fake_tokens([1, 2], 8, 320)
        failures = engine._core.parts.hooks.failures  # type: ignore[attr-defined]
        assert "gave no answer within 0.3 s" in failures["plugin:Faulty"]
        engine.run.hooks["plugin:Faulty"].cls.go_on.set()


def test_a_hook_wrapper_is_refused_since_its_body_would_not_run(tiny_model: Path, folder: Path) -> None:
    source = HEADER + (
        "class Faulty(Hook):\n    Config = ComponentConfig\n    interface_version = 1\n"
        "    def __init__(self, config): pass\n"
        "    @hookimpl(wrapper=True)\n    def run_finished(self):\n        yield\n"
    )
    write_plugin(folder, source)
    with pytest.raises(PluginError, match="run_finished is a wrapper"):
        Engine.from_config(fake_config(tiny_model, folder, hooks=["plugin:Faulty"]))


def test_a_hanging_attention_writes_late_into_blocks_that_nobody_else_got(tiny_model: Path, folder: Path) -> None:
    """The pool has just enough blocks for two requests; the late write lands while the second one runs."""
    source = HEADER + (
        "class Faulty(NaiveAttention):\n"
        "    late = threading.Event()\n"
        "    def run(self, layer, q_TNH, k_TKH, v_TKH, plan, kv):\n"
        "        out = super().run(layer, q_TNH, k_TKH, v_TKH, plan, kv)\n"
        "        if len(q_TNH) == 3:\n"
        "            self.late.wait(10)\n"
        "            out = super().run(layer, q_TNH, k_TKH + 9, v_TKH + 9, plan, kv)\n"
        "        return out\n"
    )
    write_plugin(folder, source)
    config = real_config(
        tiny_model,
        folder,
        attention="plugin:Faulty",
        kv={"use": "paged", "block_size": 4, "num_blocks": 4},
        engine={"plugin_timeout_s": 0.5, "deterministic": False},
    )
    good = ids(5, 6, 7, 8)
    with Engine.from_config(config) as engine:
        core = engine._core
        expected = engine.generate(good, GREEDY)[0]
        bad = engine.generate(ids(5, 6, 7), GREEDY)[0]
        assert bad.error is not None
        assert "attention 'plugin:Faulty' gave no answer within 0.5 s and was abandoned" in bad.error
        assert core.kv.capacity().held_blocks == 1
        name = engine.submit(good, GREEDY)
        for _ in range(3):
            engine.step()
        assert core.kv.capacity().held_blocks == 3
        core.parts.runner.attention._target._attention.late.set()
        for _ in range(200):
            if core.parts.guard.settled:
                break
            time.sleep(0.02)
        assert core.parts.guard.settled
        events = list(engine.events(name))
        assert [token for event in events for token in event.token_ids] == expected.token_ids
        assert engine.generate(good, GREEDY)[0].token_ids == expected.token_ids
        require_idle(engine)


def test_a_component_failure_while_building_is_a_plugin_error(tiny_model: Path, folder: Path) -> None:
    use = faulty(folder, "drafter", "def __init__(self, config, context): raise ComponentFailure('my part', 'is bad')")
    with pytest.raises(PluginError, match="cannot be built: my part is bad"):
        Engine.from_config(fake_config(tiny_model, folder, drafter=use))
