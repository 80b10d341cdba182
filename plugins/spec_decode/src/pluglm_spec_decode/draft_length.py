"""How many drafts the sequences of a step should have, from what was kept before and what steps and drafting take.

Nothing here sees the drafts of the step that it decides about, so lengths are stopping times and no rule of
verification is biased by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pluglm_spec_decode.acceptance import Acceptance
from pluglm_spec_decode.batch_lengths import best_lengths, least_worth
from pluglm_spec_decode.drafting_costs import DraftingCosts
from pluglm_spec_decode.step_costs import StepCosts
from pluglm_spec_decode.trials import Trials

MARGIN = 1.02  # drafts are made where they are expected to be faster by this, in trials by TRIAL_MARGIN at best
TRIAL_MARGIN = 1.05
SURPRISE = 0.1  # so unlikely a row of trials that were kept says that a class is not what it was
HORIZON = 32  # steps over which a drafter's catching up is paid for


class Wish(NamedTuple):
    """A sequence that could have a draft of each of these classes.

    num_behind: tokens that the drafter must catch up with. num_left: that the sequence gets at most.
    """

    sequence_id: int
    kinds: Sequence[int]
    num_behind: int = 0
    num_left: int = HORIZON


class _Trial(NamedTuple):
    sequence_id: int
    kind: int
    cost: float
    value: float  # of a token that is kept


class DraftLengths:
    """`limits` says what may be drafted; `observe` is told of each sequence once what came of the last such answer.

    Then `end_step` is called. All sequences share what is learned of classes; for each to be alone, give each its own.
    """

    def __init__(self, costs: StepCosts, priors: Sequence[float]) -> None:
        """priors: by class, the share of drafts kept that is assumed at first."""
        self.acceptance = Acceptance(priors)
        self.drafting = DraftingCosts()
        self._costs = costs
        self._trials = Trials()
        self._trial: _Trial | None = None
        self._hopeless: int | None = None
        self._pays: set[int] = set()

    def limits(self, wishes: Sequence[Wish]) -> list[int]:
        """By sequence, the drafts that make the step's tokens a second most; and one at times where that is none."""
        self._trial, self._hopeless, self._pays = None, None, set()
        if not wishes:
            return []
        times = self._costs.times(len(wishes), sum(len(one.kinds) for one in wishes))
        least = least_worth(len(wishes), times)
        worth = [self._worth(one, least, len(wishes) / times[0]) for one in wishes]
        drafts, speedup = best_lengths(worth, times, self.drafting.round_time, self.drafting.catching_up_time)
        if speedup < MARGIN:
            drafts = [0] * len(wishes)
        self._pays = {one.kinds[0] for one, num in zip(wishes, drafts, strict=True) if num}
        self._choose_trial(wishes, drafts, times)
        if (trial := self._trial) is not None:
            drafts[[one.sequence_id for one in wishes].index(trial.sequence_id)] = 1
        return drafts

    def observe(self, sequence_id: int, kinds: Sequence[int], num_kept: int) -> None:
        """A step verified drafts of these classes and kept the first num_kept."""
        trial = self._trial
        if trial is not None and trial.sequence_id == sequence_id and kinds:
            self._trial = None
            if num_kept:
                num_in_a_row = self._trials.succeeded(trial.kind, trial.cost - trial.value)
                if self.acceptance.share(trial.kind) ** num_in_a_row < SURPRISE:
                    self.acceptance.doubt(trial.kind)
            else:
                self._trials.failed(trial.kind, trial.cost)
        self.acceptance.observe(sequence_id, kinds, num_kept)
        for kind in kinds[: num_kept + 1]:
            self._trials.seen(kind)

    def end_step(self, time: float, num_steps: int = 1) -> None:
        """What the whole step took; and how many there were like it, that without drafts included."""
        if self._hopeless is not None:
            self._trials.failed(self._hopeless, 0.0)
        if self._trial is not None:  # its sequence ended with it
            self._trials.failed(self._trial.kind, self._trial.cost)
        for kind in self._pays:
            self._trials.paid(kind)
        self._trial, self._hopeless, self._pays = None, None, set()
        self._trials.end_step(time, num_steps)

    def _worth(self, wish: Wish, least: float, speed: float) -> list[float]:
        worth = self.acceptance.survival(wish.sequence_id, wish.kinds, least)
        if not wish.num_behind or not worth:
            return worth
        catching_up_time = wish.num_behind * self.drafting.token_time / max(1, min(HORIZON, wish.num_left))
        left = 1 - catching_up_time * speed / sum(worth)  # all of its drafts pay for it
        return [one * left for one in worth] if left > 0 else []

    def _choose_trial(self, wishes: Sequence[Wish], drafts: Sequence[int], times: Sequence[float]) -> None:
        """A draft of a class that none is made of, where drafts that are always kept would pay."""
        idle = [one for one, num in zip(wishes, drafts, strict=True) if not num and one.kinds]
        due = [one for one in idle if one.kinds[0] not in self._pays and self._trials.is_due(one.kinds[0])]
        if not due:
            return
        wish = min(due, key=lambda one: (one.num_behind, one.sequence_id))
        kind, num = wish.kinds[0], sum(drafts)
        cost = times[num + 1] - times[num] + self.drafting.round_time + wish.num_behind * self.drafting.token_time
        if not self._trials.can_pay(cost):
            return
        perfect = [[1.0] * len(one.kinds) if one.kinds and one.kinds[0] == kind else [] for one in wishes]
        if best_lengths(perfect, times, self.drafting.round_time).speedup < TRIAL_MARGIN:
            self._hopeless = kind
        else:
            self._trial = _Trial(wish.sequence_id, kind, cost, times[num] / len(wishes))
