"""What a batch of rows takes of a chain: which steps on which rows, who is drawn how. Applies nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import PerParams
from pluglm_samplers.fused import MOST_KEPT, MonotonicStep, OrderStep

Steps = list[tuple[int, list[int] | None]]  # by number, each with its active rows of a batch; None is all of them


class Fusing(NamedTuple):
    """cut: the number of the step that keeps few tokens, num_kept at most. first: the fast path may begin there, or at
    any step from there up to the cut, since none of these changes the order of tokens."""

    first: int
    cut: int
    num_kept: int


class Kind(NamedTuple):
    """What rows have in common: the steps that are active for them, by number, and how they may be fused."""

    is_greedy: bool
    steps: tuple[int, ...]
    fusing: Fusing | None


class Plan(NamedTuple):
    """Rows by number. One step of the engine after another usually has the same params, so the last plan is kept.

    params: known by identity, so kept alive. steps: of all rows, but not the fused steps of fused rows. fused_steps:
    active rows by their place among the fused ones; leading: the first of them, up to the one that keeps few tokens, at
    most num_kept.
    """

    params: list[SamplingParams]
    steps: Steps
    greedy: list[int]
    sampled: list[int]
    fused: list[int]
    fused_steps: Steps
    leading: Steps
    num_kept: int


class Planner:
    """Plans for a chain of steps. is_fused: whether rows are taken the fast way where that gives the same."""

    def __init__(self, steps: Sequence[Any], is_fused: bool) -> None:
        self._steps, self._is_fused = steps, is_fused
        self._kind_of = PerParams(self.kind)
        self._last = Plan([], [], [], [], [], [], [], 0)

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
        fusing = self._fusing(params, active) if self._is_fused and not params.greedy else None
        return Kind(params.greedy, tuple(active), fusing)

    def _fusing(self, params: SamplingParams, active: list[int]) -> Fusing | None:
        """By the first active step that keeps few tokens, if it and all behind it look at live logits alone."""
        for place, number in enumerate(active):
            if all(isinstance(self._steps[behind], OrderStep) for behind in active[place:]):
                most = self._steps[number].most_kept(params)
                if most is not None and most <= MOST_KEPT:
                    return Fusing(self._first(params, active[:place]), number, most)
        return None

    def _first(self, params: SamplingParams, before: list[int]) -> int:
        """Behind the last active step before the cut that may change the order of tokens; others count as well as none,
        so that rows with and without them begin at the same step."""
        for number in reversed(before):
            step = self._steps[number]
            if not (isinstance(step, MonotonicStep) and step.keeps_order(params)):
                return number + 1
        return 0

    def _plan(self, params: list[SamplingParams]) -> Plan:
        kinds = [self._kind_of(one) for one in params]
        cuts = Counter(kind.fusing.cut for kind in kinds if kind.fusing is not None)
        cut = min(cuts, key=lambda one: (-cuts[one], one), default=None)  # rows with another are taken whole
        of_fused = {
            row: kind.fusing for row, kind in enumerate(kinds) if kind.fusing is not None and kind.fusing.cut == cut
        }
        fused, first = list(of_fused), max((one.first for one in of_fused.values()), default=0)
        whole = [
            tuple(number for number in kind.steps if number < first or row not in of_fused)
            for row, kind in enumerate(kinds)
        ]
        fused_steps = _steps([tuple(number for number in kinds[row].steps if number >= first) for row in fused])
        return Plan(
            params=params,
            steps=_steps(whole),
            greedy=[row for row, kind in enumerate(kinds) if kind.is_greedy],
            sampled=[row for row, kind in enumerate(kinds) if not kind.is_greedy and row not in of_fused],
            fused=fused,
            fused_steps=fused_steps,
            leading=[one for one in fused_steps if cut is not None and one[0] < cut],
            num_kept=max((one.num_kept for one in of_fused.values()), default=0),
        )


def _steps(numbers: list[tuple[int, ...]]) -> Steps:
    """numbers: of each row's steps."""
    steps = Steps()
    for number in sorted({number for some in set(numbers) for number in some}):
        active = [row for row, some in enumerate(numbers) if number in some]
        steps.append((number, active if len(active) < len(numbers) else None))
    return steps
