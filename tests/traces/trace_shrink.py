"""Makes a failing trace small: every part is taken out or simplified as long as the same invariant still fails.

Delta debugging (Zeller and Hildebrandt, 2002) over the lists of a trace, then one value after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trace_case import Trace
from trace_oracle import check_trace
from trace_play import ViolationError

LISTS = ("arrivals", "cancels", "resets", "faults", "holds")
PLAIN: dict[str, tuple[Any, ...]] = {
    "when_kv_full": ("shrink",),
    "max_waiting_requests": (None,),
    "max_waiting_tokens": (None,),
    "drafts": (0, 1),
    "search": (None,),
    "tier": (None, {}, {"delay_s": 0.02}),
    "closes": (None,),
    "offload_bytes": (1 << 20,),
    "num_tokens": (64, 16, 8, 4),
    "num_seats": (1, 2, 3, 4),
    "max_model_len": (12, 24),
}
SIMPLE: dict[str, tuple[Any, ...]] = {
    "search": (None,),
    "n": (1, 2, 3),
    "salt": ("",),
    "tenant": ("",),
    "priority": (0, 1),
    "deadline_s": (None,),
    "temperature": (0.0,),
    "seed": (0,),
    "clip": (False,),
    "ignore_eos": (True,),
}


def same_failure(violation: ViolationError, twice: bool = False) -> Callable[[Trace], bool]:
    """Whether a trace fails in the same way: the same invariant and, where a component raised, the same message."""
    wanted = _kind(violation)

    def fails(trace: Trace) -> bool:
        try:
            found = check_trace(trace, twice or violation.invariant == "I13").violation
        except Exception:  # a config that its component refuses
            return False
        return found is not None and _kind(found) == wanted

    return fails


def _kind(violation: ViolationError) -> str:
    return re.sub(r"\d+", "#", str(violation)) if violation.invariant == "error" else violation.invariant


def shrink(trace: Trace, fails: Callable[[Trace], bool], max_runs: int = 3000) -> Trace:
    """The smallest failing trace that was found within that many runs."""
    shrinker = _Shrinker(trace, fails, max_runs)
    before = None
    while before != shrinker.trace:
        before = shrinker.trace
        shrinker.shorten_lists()
        shrinker.simplify_arrivals()
        shrinker.simplify_config()
        shrinker.come_earlier()
    return shrinker.trace


class _Shrinker:
    def __init__(self, trace: Trace, fails: Callable[[Trace], bool], runs_left: int) -> None:
        self.trace, self._fails, self._runs_left = trace, fails, runs_left

    def _try(self, candidate: Trace) -> bool:
        if candidate == self.trace or self._runs_left <= 0:
            return False
        self._runs_left -= 1
        if not self._fails(candidate):
            return False
        self.trace = candidate
        return True

    def shorten_lists(self) -> None:
        for name in LISTS:
            self._shorten(lambda: getattr(self.trace, name), lambda some: replace(self.trace, **{name: some}))  # noqa: B023

    def _shorten(self, current: Callable[[], tuple[Any, ...]], rebuilt: Callable[[tuple[Any, ...]], Trace]) -> None:
        """Take out half, a quarter, ... and single ones."""
        size = max(1, len(current()))
        while size:
            start = 0
            while start < len(current()):
                if not self._try(rebuilt(current()[:start] + current()[start + size :])):
                    start += size
            size //= 2

    def simplify_arrivals(self) -> None:
        for index in range(len(self.trace.arrivals)):
            self._shorten(lambda: self.trace.arrivals[index].prompt, lambda some: self._with(index, prompt=some))  # noqa: B023
            for name, values in SIMPLE.items():
                self._first(getattr(self.trace.arrivals[index], name), values, lambda v: self._with(index, **{name: v}))  # noqa: B023
            if (most := self.trace.arrivals[index].max_tokens) is not None:
                self._first(most, (*range(1, 5), most // 2, most - 1), lambda v: self._with(index, max_tokens=v))  # noqa: B023

    def _with(self, index: int, **values: Any) -> Trace:
        arrivals = list(self.trace.arrivals)
        arrivals[index] = replace(arrivals[index], **values)
        return replace(self.trace, arrivals=tuple(arrivals))

    def _first(self, current: Any, values: tuple[Any, ...], rebuilt: Callable[[Any], Trace]) -> None:
        """The first of the values, from the simplest on, with which it still fails; none behind the current one."""
        for value in values[: values.index(current)] if current in values else values:
            if value and isinstance(value, int) and isinstance(current, int) and value > current > 0 and value < 60:
                continue
            if self._try(rebuilt(value)):
                return

    def simplify_config(self) -> None:
        for name, values in PLAIN.items():
            self._first(getattr(self.trace, name), values, lambda value: replace(self.trace, **{name: value}))  # noqa: B023
        for name in ("policy_config", "kv_config"):
            for key in list(getattr(self.trace, name)):
                config = {one: value for one, value in getattr(self.trace, name).items() if one != key}
                self._try(replace(self.trace, **{name: config}))
        for key, value in list(self.trace.kv_config.items()):
            if isinstance(value, int):
                smaller = (*range(1, 5), value // 2, value - 1)
                self._first(value, smaller, lambda v: replace(self.trace, kv_config={**self.trace.kv_config, key: v}))  # noqa: B023

    def come_earlier(self) -> None:
        for name in ("arrivals", "cancels", "faults", "holds"):
            for index in range(len(getattr(self.trace, name))):
                step = getattr(self.trace, name)[index].step
                self._first(step, (*range(4), step // 2, step - 1), lambda v: self._moved(name, index, v))  # noqa: B023
        for index, step in enumerate(self.trace.resets):
            self._first(step, (0, step // 2, step - 1), lambda v: self._moved("resets", index, v))  # noqa: B023

    def _moved(self, name: str, index: int, step: int) -> Trace:
        events = list(getattr(self.trace, name))
        events[index] = step if name == "resets" else replace(events[index], step=step)
        return replace(self.trace, **{name: tuple(events)})
