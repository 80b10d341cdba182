"""Makes a failing trace small: every part is taken out or simplified as long as the same invariant still fails.

Delta debugging (Zeller and Hildebrandt, 2002) over the lists of a trace, then one value after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
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
        if candidate == self.trace or self._runs_left <= 0 or not all(one.prompt for one in candidate.arrivals):
            return False
        self._runs_left -= 1
        if not self._fails(candidate):
            return False
        self.trace = candidate
        return True

    def shorten_lists(self) -> None:
        for name in LISTS:
            self._shorten(getattr(self.trace, name), partial(self._with_list, name))

    def _with_list(self, name: str, items: tuple[Any, ...]) -> Trace:
        return replace(self.trace, **{name: items})

    def _shorten(self, items: tuple[Any, ...], rebuilt: Callable[[tuple[Any, ...]], Trace]) -> None:
        """Take out half, a quarter, ... and single ones."""
        size = max(1, len(items))
        while size:
            start = 0
            while start < len(items):
                fewer = items[:start] + items[start + size :]
                if self._try(rebuilt(fewer)):
                    items = fewer
                else:
                    start += size
            size //= 2

    def _first(self, candidates: Iterable[Trace]) -> None:
        """The first that still fails, if any: the simplest come first."""
        any(map(self._try, candidates))

    def simplify_arrivals(self) -> None:
        for index, arrival in enumerate(self.trace.arrivals):
            self._shorten(arrival.prompt, partial(self._with_prompt, index))
            for name, values in SIMPLE.items():
                simpler = _before(getattr(arrival, name), values)
                self._first(self._with(index, **{name: value}) for value in simpler)
            if arrival.max_tokens is not None:
                self._first(self._with(index, max_tokens=value) for value in _smaller(arrival.max_tokens) if value)

    def _with_prompt(self, index: int, prompt: tuple[int, ...]) -> Trace:
        return self._with(index, prompt=prompt)

    def _with(self, index: int, **values: Any) -> Trace:
        arrivals = list(self.trace.arrivals)
        arrivals[index] = replace(arrivals[index], **values)
        return replace(self.trace, arrivals=tuple(arrivals))

    def simplify_config(self) -> None:
        for name, values in PLAIN.items():
            plainer = _before(getattr(self.trace, name), values)
            self._first(replace(self.trace, **{name: value}) for value in plainer)
        for name in ("policy_config", "kv_config"):
            for key in list(getattr(self.trace, name)):
                config = {one: value for one, value in getattr(self.trace, name).items() if one != key}
                self._try(replace(self.trace, **{name: config}))
        for key, value in self.trace.kv_config.items():
            if isinstance(value, int):
                config = self.trace.kv_config
                self._first(replace(self.trace, kv_config=config | {key: less}) for less in _smaller(value) if less)

    def come_earlier(self) -> None:
        for name in ("arrivals", "cancels", "faults", "holds"):
            for index, event in enumerate(getattr(self.trace, name)):
                self._first(self._moved(name, index, step) for step in _smaller(event.step))
        for index, step in enumerate(self.trace.resets):
            self._first(self._moved("resets", index, earlier) for earlier in _smaller(step))

    def _moved(self, name: str, index: int, step: int) -> Trace:
        events = list(getattr(self.trace, name))
        events[index] = step if name == "resets" else replace(events[index], step=step)
        return replace(self.trace, **{name: tuple(events)})


def _before(current: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values from the simplest on, up to the current one."""
    return values[: values.index(current)] if current in values else values


def _smaller(number: int) -> list[int]:
    """Some numbers from 0 to below this one."""
    return sorted({one for one in (*range(5), number // 2, number - 1) if 0 <= one < number})
