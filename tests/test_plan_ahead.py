"""Planning the next step while this one is computed: it really happens meanwhile, and nobody can tell by the outputs.

Expected tokens are the fake backend's documented hash, or those of the same run planned step by step.
tests/traces/test_trace_ahead.py compares whole traces.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, real_config, require_idle, vocab_size, write_plugin
from plan_ahead_cases import SOURCE, MakeEngine, engines, run, tokens, told

from pluglm import Engine, SamplingParams
from pluglm.ahead.planning import AheadPlanning
from pluglm.backends.cuda import CudaBackend
from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.backend import LaunchingBackend
from pluglm.kernel.interfaces.kernels import KernelChoice

make = pytest.fixture(engines)


def test_the_next_step_is_planned_while_this_one_is_computed(make: MakeEngine) -> None:
    """The backend computes only after that: without planning ahead it would wait for ever, and give nothing."""
    engine = make(backend="Waiting")
    core: Any = engine.core
    backend, seen = core.parts.runner.backend, list[int]()

    def planned(view: Any) -> None:
        seen.append(view.step)
        if backend.planned is not None:
            backend.planned.set()

    core.parts.policy.told = planned
    steps = run(engine, [1, 2, 3])
    assert tokens(steps) == fake_tokens([1, 2, 3], 8, vocab_size(engine))
    assert seen == list(range(8))  # each step is asked about once: none was dropped
    assert core._planning.kept == 7


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "n": 2}])
def test_a_real_model_gives_the_same_tokens(params: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    write_plugin(tmp_path, SOURCE)
    asked = SamplingParams(max_tokens=12, **params)
    prompts = [{"prompt_token_ids": [5 + i, 9, 7 * i + 3][: 1 + i]} for i in range(3)]
    found = []
    for ahead in (True, False):
        slots: dict[str, Any] = {"backend": "plugin:LateCpu", "engine": {"plan_ahead": ahead}}
        with Engine.from_config(real_config(tiny_model, tmp_path, **slots)) as engine:
            outputs = engine.generate(prompts, asked)
            found.append([(one.token_ids, one.text, one.finish_reason) for one in outputs])
            planning: Any = engine.core._planning
            assert getattr(planning, "kept", 0) > 0 if ahead else type(planning) is not AheadPlanning
    assert found[0] == found[1]


def test_hooks_see_each_step_once_and_at_its_time(make: MakeEngine) -> None:
    """The clock of a view is that of the step, not the one at which it was planned."""
    seen = []
    for ahead in (True, False):
        engine = make(ahead=ahead)
        core: Any = engine.core
        views: list[Any] = []
        call = core.parts.hooks.call

        def record(hook: str, views: list[Any] = views, call: Any = call, **arguments: Any) -> None:
            if hook == "step_planned":
                views.append((arguments["view"], arguments["plan"]))
            call(hook, **arguments)

        core.parts.hooks.call = record
        run(engine, [1, 2], [3])
        seen.append(views)
    assert seen[0] == seen[1]
    assert len({view.now_s for view, _ in seen[0]}) == len(seen[0])


FAULTS: dict[str, Callable[[Any], None]] = {}


def fault(function: Callable[[Any], None]) -> Callable[[Any], None]:
    FAULTS[function.__name__] = function
    return function


@fault
def raises_at_step_3(view: Any) -> None:
    if view.step == 3:
        raise ValueError("not this one")


@fault
def leaves_at_step_3(view: Any) -> None:
    if view.step == 3:
        raise SystemExit(4)


@fault
def raises_when_alone(view: Any) -> None:
    if len(view.running) == 1:
        raise ValueError("nobody else")


@pytest.mark.parametrize("name", FAULTS)
def test_a_scheduler_that_fails_ahead_fails_as_it_does_in_time(make: MakeEngine, name: str) -> None:
    """The step that is computed meanwhile is delivered; the next one ends whoever is live, by the scheduler's name."""
    seen = []
    for ahead in (True, False):
        engine = make(ahead=ahead)
        core: Any = engine.core
        core.parts.policy.told = FAULTS[name]
        core.add("short", [7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        seen.append(told(run(engine, [1, 2, 3])))
        core.parts.policy.told = lambda view: None
        assert tokens(run(engine, [4])) == fake_tokens([4], 8, vocab_size(engine))
        require_idle(engine)
    assert seen[0] == seen[1]
    errors = [one[5] for step in seen[0] for one in step if one[5]]
    assert errors
    assert all(one.startswith("scheduler 'plugin:Policy' raised ") for one in errors)


def test_a_failure_ahead_of_a_step_that_does_not_come_is_nobodys(make: MakeEngine) -> None:
    engine = make()
    core: Any = engine.core

    def pair_at_step_3(view: Any) -> None:
        if view.step == 3 and len(view.running) == 2:
            raise ValueError("a pair")

    core.parts.policy.told = pair_at_step_3
    core.add("gone", [7], GREEDY)
    core.add("r0", [1, 2], GREEDY)
    steps = [core.step() for _ in range(3)]
    core.cancel("gone")
    while core.roster.requests:
        steps.append(core.step())
    assert tokens(steps) == fake_tokens([1, 2], 8, vocab_size(engine))
    assert not [one for events in steps for one in events if one.error]


@pytest.mark.parametrize("scheduler", ["NoWayBack", "NoCheckpoint"])
def test_a_checkpoint_that_fails_is_a_failure_of_the_scheduler(make: MakeEngine, scheduler: str) -> None:
    engine = make(scheduler=scheduler)
    core: Any = engine.core
    core.parts.policy.fails = True
    core.add("r0", [1, 2], GREEDY)
    core.step()
    core.add("more", [3], GREEDY)  # which was not foreseen
    steps = [core.step()]
    if scheduler == "NoCheckpoint":
        steps.append(core.step())
    says = {"NoWayBack": "no way back", "NoCheckpoint": "no checkpoint"}[scheduler]
    ends = {one.request_id: one.error for events in steps for one in events if one.error}
    assert ends == dict.fromkeys(("r0", "more"), f"scheduler 'plugin:{scheduler}' raised ValueError: {says}")
    core.kv.audit()


@pytest.mark.parametrize(("backend", "says"), [("BadStart", "no launch"), ("BadEnd", "lost on the way")])
def test_a_backend_that_fails_ends_its_step_and_the_plan_ahead_is_forgotten(
    make: MakeEngine, backend: str, says: str
) -> None:
    engine = make(backend=backend)
    core: Any = engine.core
    core.add("bad", [1, 2], GREEDY)
    core.step()
    core.parts.runner.backend.fails = True
    assert [one.error for one in core.step()] == [f"backend 'plugin:{backend}' raised RuntimeError: {says}"]
    core.parts.runner.backend.fails = False
    assert tokens(run(engine, [3, 4])) == fake_tokens([3, 4], 8, vocab_size(engine))
    require_idle(engine)


def test_a_scheduler_that_hangs_ahead_is_given_up_by_name(make: MakeEngine) -> None:
    engine = make(engine={"plugin_timeout_s": 0.3})
    core: Any = engine.core
    release = threading.Event()

    def hang_at_step_3(view: Any) -> None:
        if view.step == 3:
            release.wait(20)

    core.parts.policy.told = hang_at_step_3
    try:
        steps = run(engine, [1, 2])
        ends = [one for events in steps for one in events if one.finish_reason]
        assert [one.finish_reason for one in ends] == ["error"]
        assert ends[0].error is not None
        assert ends[0].error.startswith("scheduler 'plugin:Policy' gave no answer within 0.3 s")
    finally:
        release.set()
    core.parts.policy.told = lambda view: None
    assert tokens(run(engine, [4])) == fake_tokens([4], 8, vocab_size(engine))


def test_an_interrupt_while_it_plans_ahead_leaves_nothing_open(make: MakeEngine) -> None:
    """The same requests then go on to the same tokens."""
    engine = make()
    core: Any = engine.core
    release, seen = threading.Event(), list[int]()

    def interrupt_once(view: Any) -> None:
        seen.append(view.step)
        if seen.count(3) == 1 and view.step == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            release.wait(20)

    core.parts.policy.told = interrupt_once
    core.add("r0", [1, 2], GREEDY)
    steps = [core.step() for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        core.step()  # step 2, while which step 3 is planned
    core.kv.transaction().rollback()  # none that is open is in the way
    release.set()
    while core.roster.requests:
        steps.append(core.step())
    assert tokens(steps) == fake_tokens([1, 2], 8, vocab_size(engine))
    core.step()
    require_idle(engine)


def test_a_cancel_a_reset_and_an_arrival_between_two_steps_are_planned_for(make: MakeEngine) -> None:
    """What was planned ahead is dropped, with its transaction."""
    engine = make(kv="hash_prefix")
    core: Any = engine.core
    core.add("r0", [1, 2, 3], GREEDY)
    core.add("gone", [4], GREEDY)
    steps = [core.step(), core.step()]
    core.cancel("gone")
    core.kv.audit()
    steps.append(core.step())
    engine.reset_prefix_cache()
    steps.append(core.step())
    core.add("r1", [1, 2, 3], GREEDY)
    while core.roster.requests:
        steps.append(core.step())
    for name in ("r0", "r1"):
        assert tokens(steps, name) == fake_tokens([1, 2, 3], 8, vocab_size(engine))
    assert core._planning.dropped >= 3
    core.step()
    require_idle(engine)


REFUSED = {
    "backend": ({"backend": "fake"}, "backend 'fake' computes on the thread that plans"),
    "policy": ({"scheduler": "fair"}, "scheduler 'fair' cannot take back"),
    "subclass": ({"scheduler": "plugin:Heir"}, "scheduler 'plugin:Heir' cannot take back"),
    "drafter": ({"drafter": "ngram"}, "drafter 'ngram' has its say before each plan"),
    "kv_tiers": ({"kv": "hash_prefix", "kv_tiers": ["host"]}, "KV tier 'host' may bring KV before each plan"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wish_that_cannot_be_had_is_refused_and_auto_does_without(
    what: str, tiny_model: Path, tmp_path: Path
) -> None:
    write_plugin(tmp_path, SOURCE)
    changed, says = REFUSED[what]
    slots: dict[str, Any] = {"backend": "plugin:LateFake", **changed}
    with pytest.raises(IncompatibleError, match=f"^engine.plan_ahead: {says}"):
        Engine.from_config(fake_config(tiny_model, tmp_path, **slots, engine={"plan_ahead": True}))
    with Engine.from_config(fake_config(tiny_model, tmp_path, **slots)) as engine:
        assert not isinstance(engine.core._planning, AheadPlanning)


def test_what_auto_chose_is_recorded(tiny_model: Path, tmp_path: Path) -> None:
    write_plugin(tmp_path, SOURCE)
    reason = "backend 'cpu' computes on the thread that plans, and gains nothing by it"
    wanted = {
        "cpu": KernelChoice("planning", "step by step", (("ahead", reason),)),
        "plugin:LateCpu": KernelChoice("planning", "ahead"),
    }
    for backend, choice in wanted.items():
        with Engine.from_config(real_config(tiny_model, tmp_path, backend=backend)) as engine:
            assert choice in engine.kernels
            assert isinstance(engine.core._planning, AheadPlanning) == (choice.kernel == "ahead")


def test_a_gpu_launches() -> None:
    """By its class: none is needed for that."""
    assert issubclass(CudaBackend, LaunchingBackend)
