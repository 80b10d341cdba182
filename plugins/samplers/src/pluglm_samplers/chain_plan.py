"""What a batch of rows takes of a chain: which steps on which rows, who is drawn how. Applies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import PerParams
from pluglm_samplers.fused import MOST_KEPT, OrderStep

Steps = list[tuple[int, list[int] | None]]  # by number, each with its active rows of a batch; None is all of them


class Kind(NamedTuple):
    """What rows have in common: the steps that are active for them, by number, and from which on they may be fused."""

    is_greedy: bool
    steps: tuple[int, ...]
    first_fused: int | None


class Plan(NamedTuple):
    """Rows by number. One step of the engine after another usually has the same params, so the last plan is kept.

    params: known by identity, so kept alive. steps: of all rows, but not the fused steps of fused rows. fused_steps:
    active rows by their place among the fused ones; num_kept: the most tokens that the first of them keeps.
    """

    params: list[SamplingParams]
    steps: Steps
    greedy: list[int]
    sampled: list[int]
    fused: list[int]
    fused_steps: Steps
    num_kept: int


class Planner:
    """Plans for a chain of steps. is_fused: whether rows are taken the fast way where that gives the same."""

    def __init__(self, steps: Sequence[Any], is_fused: bool) -> None:
        self._steps, self._is_fused = steps, is_fused
        self._kind_of = PerParams(self.kind)
        self._last = Plan([], [], [], [], [], [], 0)

    def plan(self, params: list[SamplingParams]) -> Plan:
        last = self._last
        if len(params) != len(last.params) or not all(map(is_, params, last.params)):
            last = self._last = self._plan(params)
        return last

    def kind(self, params: SamplingParams) -> Kind:
        past_temperature, active = False, list[int]()
        for number, step in enumerate(self._steps):
            past_temperature = past_temperature or "temperature" in step.parameters
            is_skipped = params.greedy and (past_temperature or step.argmax_invariant)
            if not is_skipped and step.is_active(params):
                active.append(number)
        first = self._first_fused(params, active) if self._is_fused and not params.greedy else None
        return Kind(params.greedy, tuple(active), first)

    def _first_fused(self, params: SamplingParams, active: list[int]) -> int | None:
        """The first active step that keeps few tokens, if it and all behind it look at live logits alone."""
        for place, number in enumerate(active):
            if all(isinstance(self._steps[behind], OrderStep) for behind in active[place:]):
                most = self._steps[number].most_kept(params)
                if most is not None and most <= MOST_KEPT:
                    return number
        return None

    def _plan(self, params: list[SamplingParams]) -> Plan:
        kinds = [self._kind_of(one) for one in params]
        firsts = [kind.first_fused for kind in kinds if kind.first_fused is not None]
        first = min(firsts, default=len(self._steps))  # rows that could be fused from another step on are not
        fused = [row for row, kind in enumerate(kinds) if kind.first_fused == first]
        whole = [
            tuple(number for number in kind.steps if number < first or kind.first_fused != first) for kind in kinds
        ]
        return Plan(
            params=params,
            steps=_steps(whole),
            greedy=[row for row, kind in enumerate(kinds) if kind.is_greedy],
            sampled=[row for row, kind in enumerate(kinds) if not kind.is_greedy and kind.first_fused != first],
            fused=fused,
            fused_steps=_steps([tuple(number for number in kinds[row].steps if number >= first) for row in fused]),
            num_kept=max((self._steps[first].most_kept(params[row]) for row in fused), default=0),
        )


def _steps(numbers: list[tuple[int, ...]]) -> Steps:
    """numbers: of each row's steps."""
    steps = Steps()
    for number in sorted({number for some in set(numbers) for number in some}):
        active = [row for row, some in enumerate(numbers) if number in some]
        steps.append((number, active if len(active) < len(numbers) else None))
    return steps
