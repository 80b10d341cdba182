"""Base of this package's drafters: `adaptive: true` drafts as much as pays, by what was kept and what steps took."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.drafter import ADAPTS, SHARES, Drafter, DraftRequest, Proposal
from pluglm_spec_decode.draft_length import DraftLengths, Wish
from pluglm_spec_decode.drafting_costs import FEW
from pluglm_spec_decode.resting import Resting
from pluglm_spec_decode.step_costs import FixedCosts, MeasuredCosts

PRIOR_ACCEPTANCE = 0.7
MOST_PLAIN = 8  # in a row for the sake of measuring: where prompts are computed in all steps, none can be measured
BY_THE_CLOCK = "the lengths of its drafts depend on the clock, and the text on them; set drafter.draft_cost"


class AdaptiveConfig(ComponentConfig):
    """num_tokens: proposed at most. adaptive: fewer are proposed, or none, where more have not paid before.

    draft_cost: what one draft of every sequence adds to a step, as a share of a step without drafts; None measures it.
    Without adaptive nothing looks at it, so it is refused.
    """

    num_tokens: int = Field(default=4, ge=1, le=32)
    adaptive: bool = False
    draft_cost: float | None = Field(default=None, ge=0, le=100)

    @model_validator(mode="after")
    def _cost_is_used(self) -> Self:
        if self.draft_cost is not None and not self.adaptive:
            raise ValueError("draft_cost is used only with adaptive: true; set it or leave draft_cost out")
        return self


@dataclass(slots=True)
class _Step:
    """The step last proposed for. made: by sequence, the classes of the drafts that it has, num_drafts in all.

    Who was asked for and got none counts as having a draft, which is not kept: asking was not worth more.
    waiting: the drafts of each sequence whose outcome has not come. Where nobody has room for drafts there are steps
    without a proposal, whose outcomes say nothing of this one.
    asked: tokens of each sequence that `_propose` was asked about. num_rounds: most drafts of one of them that it was
    asked for. num_behind: tokens that it had to catch up with.
    """

    started_s: float
    made: dict[int, Sequence[int]]
    waiting: dict[int, list[int]]
    num_drafts: int
    asked: dict[int, int]
    num_rounds: int
    num_behind: int
    drafting_s: float
    observed_s: float | None = None  # when its latest outcome came
    is_alone: bool = True  # no other sequence had an outcome, as one has whose prompt was computed in it


class AdaptiveDrafter(Drafter):
    """Asks the drafter proper, `_propose`, for as many tokens as pay; hands everything on when not adaptive.

    A measured cost is that of whole steps, from the proposal to the last outcome: drafting, verification and management
    are in it. How much is drafted then depends on the clock, and under `reproducible` no text depends on that; so all
    sequences may as well share what is learned, and the drafts of a step be chosen together. With a fixed draft_cost a
    sequence's lengths depend on its own past alone.
    """

    priors: ClassVar[Sequence[float]] = (PRIOR_ACCEPTANCE,)  # by class of confidence
    may_rest: ClassVar[bool] = False  # True: the text does not tell how good its drafts will be, as by _kinds

    @classmethod
    def most_tokens(cls, config: AdaptiveConfig) -> int:
        return config.num_tokens

    def __init__(self, config: AdaptiveConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most = config.num_tokens
        self._is_adaptive = config.adaptive
        self._clock = clock
        self._measured = MeasuredCosts() if config.draft_cost is None else None
        self._fixed = FixedCosts(config.draft_cost or 0.0)
        self._shared = DraftLengths(self._measured or self._fixed, self.priors)
        self._own: dict[int, DraftLengths] = {}  # by sequence, with a fixed cost
        self._seen: dict[int, int] = {}  # tokens of each sequence when `_propose` was last asked about it
        self._step: _Step | None = None
        self._num_plain = 0  # steps without drafts that were wanted for their time, since one was last measured
        self._resting = Resting()

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        if not config.adaptive:
            return Capabilities()
        if config.draft_cost is not None:
            return Capabilities(provides=frozenset({ADAPTS}))
        refuses = dict.fromkeys(("verification:token", "verification:block"), BY_THE_CLOCK)
        return Capabilities(provides=frozenset({ADAPTS, SHARES}), refuses=refuses)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if not self._is_adaptive:
            return self._propose(requests)
        ids = [request.sequence_id for request in requests]
        if self._resting.spares(ids):
            return [Proposal([]) for _ in ids]
        self._close_step()
        started_s = self._clock()
        wishes = [self._wish(request) for request in requests]
        limits = self._limits(wishes)
        if self._measured is not None and self.may_rest:
            self._resting.decided(ids, is_idle=not any(limits) and not self._num_plain)
        limited = [
            replace(request, max_tokens=min(request.max_tokens, limit))
            for request, limit in zip(requests, limits, strict=True)
            if limit
        ]
        asked_s = self._clock()
        answers = self._propose(limited) if limited else []
        drafting_s = self._clock() - asked_s
        found = dict(zip((one.sequence_id for one in limited), answers, strict=True))
        proposals = [found.get(one.sequence_id) or Proposal([]) for one in requests]
        self._step = _Step(
            started_s,
            made={
                wish.sequence_id: wish.kinds[: max(len(proposal.token_ids), wish.sequence_id in found)]
                for wish, proposal in zip(wishes, proposals, strict=True)
            },
            waiting={
                request.sequence_id: proposal.token_ids for request, proposal in zip(requests, proposals, strict=True)
            },
            num_drafts=sum(len(proposal.token_ids) for proposal in answers),
            asked={one.sequence_id: len(one.token_ids) for one in limited},
            num_rounds=max(limits, default=0),
            num_behind=sum(wish.num_behind for wish in wishes if wish.sequence_id in found),
            drafting_s=drafting_s,
        )
        return proposals

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        self._resting.observed()
        step = None if self._resting.is_on else self._step  # which had its outcomes before the rest
        if step is not None and sequence_id in step.waiting:
            drafts = step.waiting.pop(sequence_id)
            # The token after the kept ones is another than the draft there, unless that one was never verified.
            is_cut = num_accepted < min(len(drafts), len(token_ids)) and token_ids[num_accepted] == drafts[num_accepted]
            kinds = step.made[sequence_id]
            self._learn(sequence_id, kinds[:num_accepted] if is_cut else kinds, num_accepted)
            step.observed_s = self._clock()
        elif step is not None and sequence_id not in step.made:
            step.is_alone = False
        self._observe(sequence_id, num_accepted, token_ids)

    def release(self, sequence_id: int) -> None:
        self._own.pop(sequence_id, None)
        self._shared.acceptance.release(sequence_id)
        self._seen.pop(sequence_id, None)
        if self._step is not None:
            self._step.asked.pop(sequence_id, None)
            self._step.waiting.pop(sequence_id, None)
        self._release(sequence_id)

    @abstractmethod
    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """As `propose`, for those sequences alone that may have a draft now."""

    def _observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """As `observe`, also for sequences that the last `_propose` was not asked about."""

    def _release(self, sequence_id: int) -> None:
        """As `release`."""

    def _kinds(self, request: DraftRequest) -> Sequence[int]:
        """The class of confidence, an index of `priors`, of each draft that could be proposed.

        It may depend on everything but drafts and coins.
        """
        return (0,) * min(self._most, request.max_tokens)

    def _wish(self, request: DraftRequest) -> Wish:
        num_new = len(request.token_ids) - self._seen.get(request.sequence_id, 0)
        num_left = request.request.max_new_tokens - request.position
        return Wish(request.sequence_id, self._kinds(request), max(0, num_new - FEW), num_left)

    def _limits(self, wishes: list[Wish]) -> list[int]:
        if self._measured is None:
            return [self._alone(one.sequence_id).limits([one])[0] for one in wishes]
        if wishes and self._num_plain < MOST_PLAIN and self._measured.wants_plain(len(wishes)):
            self._num_plain += 1
            return [0] * len(wishes)
        return self._shared.limits(wishes)

    def _learn(self, sequence_id: int, kinds: Sequence[int], num_kept: int) -> None:
        if self._measured is not None:
            self._shared.observe(sequence_id, kinds, num_kept)
        else:
            own = self._alone(sequence_id)
            own.observe(sequence_id, kinds, num_kept)
            own.end_step(self._fixed.times(1, len(kinds))[len(kinds)])

    def _alone(self, sequence_id: int) -> DraftLengths:
        if sequence_id not in self._own:
            self._own[sequence_id] = DraftLengths(self._fixed, self.priors)
        return self._own[sequence_id]

    def _close_step(self) -> None:
        """The time of the step before is known now; of one without an outcome there is none."""
        step, self._step = self._step, None
        if self._measured is None or step is None or step.observed_s is None:
            return
        self._seen |= step.asked
        seconds, num_steps = step.observed_s - step.started_s, 1 + self._resting.num_rested
        if step.is_alone and seconds > step.drafting_s:  # a clock may stand still, or be set back
            self._measured.note(len(step.made), step.num_drafts, seconds - step.drafting_s, num_steps)
            self._num_plain = 0
        if not self._measured.has_pace:  # nothing to compare times with
            return
        self._shared.end_step(max(0.0, seconds) / self._measured.pace, num_steps)
        if step.asked and step.drafting_s >= 0:
            self._shared.drafting.note(step.num_rounds, step.num_behind, step.drafting_s / self._measured.pace)
