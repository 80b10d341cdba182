"""Base of this package's drafters: with `adaptive: true` a sequence's past decides how much is drafted for it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import Field, model_validator

from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.drafter import ADAPTS, SHARES, Drafter, DraftRequest, Proposal
from pluglm_spec_decode.draft_length import PRIOR_ACCEPTANCE, DraftLength
from pluglm_spec_decode.step_costs import FixedCosts, MeasuredCosts, StepCosts

NEWEST = 0.2  # weight of a sequence that ends, against all before it
BY_THE_CLOCK = "the lengths of its drafts depend on the clock, and the text on them; set drafter.draft_cost"


# (tokens of context at least, share of drafts accepted at first): classes of confidence of what is copied
CONFIDENCES = ((0, 0.3), (2, 0.6), (3, 0.8), (8, 0.9))


def confidence_of(num_context: int) -> tuple[int, float]:
    """As `_confidence`, by how many tokens of context drafts were chosen: the more, the more of them come true."""
    level = sum(num_context >= least for least, _ in CONFIDENCES[1:])
    return level, CONFIDENCES[level][1]


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
    """The step last proposed for. made: by sequence, the length that decided and how many drafts there were."""

    started_s: float
    made: dict[int, tuple[DraftLength | None, int]]
    observed_s: float | None = None  # when its latest outcome came
    num_committed: int = 0


class AdaptiveDrafter(Drafter):
    """Asks the drafter proper, `_propose`, for as many tokens as pay; hands everything on when not adaptive.

    A measured cost is that of whole steps, from the proposal to the last outcome: drafting, verification and management
    are in it. How much is drafted then depends on the clock, and under `reproducible` no text depends on that; so a
    sequence may as well begin with what the ones before it came to. With a fixed draft_cost its lengths depend on its
    own past alone.
    """

    @classmethod
    def most_tokens(cls, config: AdaptiveConfig) -> int:
        return config.num_tokens

    def __init__(self, config: AdaptiveConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most = config.num_tokens
        self._is_adaptive = config.adaptive
        self._clock = clock
        self._measured = MeasuredCosts() if config.draft_cost is None else None
        self._costs: StepCosts = self._measured or FixedCosts(config.draft_cost or 0.0)
        self._lengths: dict[int, dict[int, DraftLength]] = {}  # by sequence, then by confidence
        self._typical: dict[int, float] = {}  # acceptance by confidence, of sequences that ended
        self._step: _Step | None = None

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
        self._close_step()
        started_s, count = self._clock(), len(requests)
        is_plain = self._measured is not None and count > 0 and self._measured.wants_plain(count)
        lengths = [None if is_plain else self._length(request) for request in requests]
        limits = [0 if one is None else one.limit(self._costs, count) for one in lengths]
        limited = [
            replace(request, max_tokens=min(request.max_tokens, limit))
            for request, limit in zip(requests, limits, strict=True)
            if limit
        ]
        found = dict(zip((one.sequence_id for one in limited), self._propose(limited), strict=True))
        proposals = [found.get(one.sequence_id) or Proposal([]) for one in requests]
        made = {
            request.sequence_id: (length, len(proposal.token_ids))
            for request, length, proposal in zip(requests, lengths, proposals, strict=True)
        }
        self._step = _Step(started_s, made)
        return proposals

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        step = self._step
        if step is not None and sequence_id in step.made:
            length, num_proposed = step.made[sequence_id]
            if length is not None:
                length.observe(num_proposed, num_accepted, self._costs, len(step.made))
            step.observed_s, step.num_committed = self._clock(), step.num_committed + len(token_ids)
        self._observe(sequence_id, num_accepted, token_ids)

    def release(self, sequence_id: int) -> None:
        ended = self._lengths.pop(sequence_id, {})
        if self._measured is not None:
            for confidence, length in ended.items():
                if length.is_tested:
                    before = self._typical.get(confidence, length.acceptance)
                    self._typical[confidence] = before + NEWEST * (length.acceptance - before)
        self._release(sequence_id)

    @abstractmethod
    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """As `propose`, for those sequences alone that may have a draft now."""

    def _observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """As `observe`, also for sequences that the last `_propose` was not asked about."""

    def _release(self, sequence_id: int) -> None:
        """As `release`."""

    def _confidence(self, request: DraftRequest) -> tuple[int, float]:
        """(class, share of drafts accepted that is assumed at first) of the proposal to come.

        Each class of a sequence has a length of its own. The class may depend on everything but drafts and coins.
        """
        return 0, PRIOR_ACCEPTANCE

    def _length(self, request: DraftRequest) -> DraftLength:
        confidence, acceptance = self._confidence(request)
        acceptance = self._typical.get(confidence, acceptance)
        lengths = self._lengths.setdefault(request.sequence_id, {})
        return lengths.setdefault(confidence, DraftLength(self._most, acceptance))

    def _close_step(self) -> None:
        """The time of the step before is known now; of one without an outcome there is none."""
        step, self._step = self._step, None
        if self._measured is not None and step is not None and step.observed_s is not None:
            num_drafts = sum(num_proposed for _, num_proposed in step.made.values())
            self._measured.note(len(step.made), num_drafts, step.observed_s - step.started_s, step.num_committed)
