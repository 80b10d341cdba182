"""The contract kit of hook classes: every method is a hook that exists, is marked, fits its spec and can be called."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pluglm.kernel.core import Budget, Event, PlanItem, Request, RequestMetrics, StepPlan, StepView
from pluglm.kernel.hooks import HookSpecs
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import class_checks
from pluglm.testing.simulation import Job
from pluglm.verification.counts import SpeculationCounts

MARK = "pluglm_impl"  # what pluggy's marker of this project leaves on a method


def hooks_checks(cls: type[Any], config: Any = None) -> Iterator[Check]:
    """Every check of a hook class."""
    config = cls.Config() if config is None else config

    def build() -> object:
        hook: object = cls(config)
        return hook

    yield from class_checks("hooks", cls, config, build, lambda hook: _call(hook, "run_finished", {}))
    yield make_check(implements_a_hook, cls)
    yield make_check(marked_methods_are_hooks, cls)
    yield make_check(hooks_are_marked, cls)
    yield make_check(arguments_fit_the_specs, cls)
    yield make_check(hooks_can_be_called, build)
    yield make_check(what_is_shown_is_not_changed, build)


def hook_names() -> frozenset[str]:
    return frozenset(name for name, value in vars(HookSpecs).items() if inspect.isfunction(value))


def _methods(cls: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(cls, callable) if not name.startswith("__")}


def _marked(cls: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in _methods(cls).items() if getattr(value, MARK, None)}


def implements_a_hook(cls: type[Any]) -> None:
    expect(bool(_marked(cls)), "at least one method marked @hookimpl", sorted(_methods(cls)))


def marked_methods_are_hooks(cls: type[Any]) -> None:
    unknown = sorted(set(_marked(cls)) - hook_names())
    expect(not unknown, f"names among {sorted(hook_names())}", unknown)


def hooks_are_marked(cls: type[Any]) -> None:
    """A method that is named like a hook and not marked would never be called."""
    silent = sorted((set(_methods(cls)) & hook_names()) - set(_marked(cls)))
    expect(not silent, "@hookimpl on every method named like a hook", silent)


def arguments_fit_the_specs(cls: type[Any]) -> None:
    for name, method in _marked(cls).items():
        if name in hook_names():
            own, known = set(_parameters(method)), set(_parameters(vars(HookSpecs)[name]))
            expect(own <= known, f"arguments of {name} among {sorted(known)}", sorted(own))


def _parameters(function: Any) -> list[str]:
    """Names without self."""
    return list(inspect.signature(function).parameters)[1:]


def hooks_can_be_called(build: Callable[[], object]) -> None:
    """In the order of a run. The engine survives an exception, but what the hook was to record is lost."""
    hook = build()
    for name, arguments in story():
        _call(hook, name, arguments)


def what_is_shown_is_not_changed(build: Callable[[], object]) -> None:
    hook = build()
    for name, arguments in story():
        before = copy.deepcopy(arguments)
        try:
            _call(hook, name, arguments)
        except Exception:  # hooks_can_be_called reports whatever it is
            continue
        expect(arguments == before, f"the arguments of {name} unchanged, {before}", arguments)


def _call(hook: object, name: str, arguments: dict[str, Any]) -> None:
    method = _marked(type(hook)).get(name)
    if method is not None:
        wanted = [one for one in _parameters(method) if one in arguments]
        getattr(hook, name)(**{one: arguments[one] for one in wanted})


def story() -> list[tuple[str, dict[str, Any]]]:
    """Hook names with the arguments of a short run: one request, one step, two events."""
    request = Request(
        request_id="r1", prompt_token_ids=(1, 2, 3), params=SamplingParams(), seed=5, arrival_s=0.5, max_new_tokens=4
    )
    view = StepView(
        step=0,
        now_s=0.5,
        budget=Budget(num_tokens=16, num_seats=2),
        running=(),
        waiting=(Job(sequence_id=1, arrival=50, num_prompt=3, max_new=4).view(),),
    )
    metrics = RequestMetrics(
        num_prompt_tokens=3,
        num_output_tokens=1,
        arrival_s=0.5,
        first_token_s=0.6,
        finished_s=0.6,
        num_preemptions=0,
        speculation=SpeculationCounts(),
    )
    slot: dict[str, Any] = {
        "name": "fcfs",
        "distribution": None,
        "version": None,
        "class": "module:Class",
        "config": {},
    }
    return [
        ("run_started", {"plan": {"scheduler": slot}}),
        ("request_admitted", {"request": request}),
        ("step_planned", {"view": view, "plan": StepPlan((PlanItem(1, 3),), ())}),
        ("event_emitted", {"event": Event(request_id="r1", token_ids=(7,), text="a")}),
        ("event_emitted", {"event": Event(request_id="r1", finish_reason="length", metrics=metrics)}),
        ("event_emitted", {"event": Event(request_id="r2", finish_reason="refused", error="too long")}),
        ("step_done", {"step": 0, "seconds": 0.1, "num_tokens": 3}),
        ("run_finished", {}),
    ]
