"""Earliest deadline first, with a door: preferences of the kernel's planner. Knows due times and step times, never KV.

Source of method: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment" (1973).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Need, Preemption, Reject, SchedulingPolicy, Skip, Stop, Victims
from pluglm_schedulers.duration import Seconds
from pluglm_schedulers.ranks import arrival, behind, is_running
from pluglm_schedulers.step_shares import StepShares
from pluglm_schedulers.step_time import StepTime, StepTimes

if TYPE_CHECKING:
    from pluglm.kernel.core import Event, RequestView, StepView


class DeadlineConfig(ComponentConfig):
    """step_s, token_s: what a step and each token in it take ("10ms", seconds); null is what is observed.

    output_share: part of its max_tokens that a request is expected to need; 0 is the first token alone.
    """

    step_s: Seconds | None = None
    token_s: Seconds | None = None
    output_share: float = Field(default=1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _both_or_neither(self) -> DeadlineConfig:
        if (self.step_s is None) != (self.token_s is None):
            raise ValueError("give step_s and token_s both, or neither to have them observed")
        return self


class DeadlinePolicy(SchedulingPolicy):
    """The request that is due first goes first; those without a deadline come last. Ties by arrival, then sequence id.

    That total order never changes. Whoever waits preempts running ones that are due strictly later, the last in order
    first: for a seat they are paused, so that they lose no work, for KV they compute again. A running request takes KV
    from any running one behind it. No two requests preempt each other in turn. A request is overtaken only by those
    due before it, all of which arrive before its deadline, at which the engine ends it. One without a deadline may
    wait as long as others with one keep coming. The next in order holds back all behind it. Decodes are served before
    chunks of prompts; a prompt leaves half of a step's prompt tokens to waiting ones that are due earlier.

    A request is refused when it could not be done by its deadline even if it had a seat at once and shared its steps
    with nobody but the prompts that are due before its own. Cached prefixes are not known at the door.
    """

    interface_version = 1
    Config = DeadlineConfig

    def __init__(self, config: DeadlineConfig, context: BuildContext) -> None:
        self._output_share, self._max_step_tokens = config.output_share, context.max_step_tokens
        self._given = None
        if config.step_s is not None and config.token_s is not None:
            self._given = StepTime(config.step_s, config.token_s)
        self._times, self._shares = StepTimes(), StepShares()
        self._live: dict[str, RequestView] = {}

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        time = self._given or self._times.estimate()
        left_s = math.inf if request.deadline_s is None else request.deadline_s - request.arrival_s
        if left_s <= 0:
            return Reject(f"its deadline passed {-left_s:.3f} s ago")
        if time is not None:
            before = [one for one in self._live.values() if _rank(one) < _rank(request)]
            num_before = sum(gap for one in before if (gap := one.num_known - one.num_computed) > 1)
            num_output = max(1, math.ceil(self._output_share * request.max_new_tokens))
            num_tokens = num_before + request.num_prompt + num_output - 1
            num_steps = math.ceil((num_before + request.num_prompt) / self._max_step_tokens) + num_output - 1
            needed_s = num_steps * time.step_s + num_tokens * time.token_s
            if needed_s > left_s:
                return Reject(
                    f"it needs {needed_s:.3f} s ({num_steps} steps of {time.step_s:.2g} s, {num_tokens} tokens of "
                    f"{time.token_s:.2g} s, {num_before} of them before its own) and its deadline is in {left_s:.3f} s"
                )
        self._live[request.request_id] = request
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        if self._given is None:
            self._times.planning(view)
        self._live = {one.request_id: one for one in (*view.running, *view.waiting)}
        return self._shares.by_rank(view, _rank)

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in sorted(view.waiting, key=_rank)]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return self._shares.share(request, tokens_left)

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """Victims as the class says, the last in order first; Stop when there is none, so nobody slips past."""
        victims = behind(view, request, _rank)
        if not is_running(view, request):
            victims = [other for other in victims if _due(other) > _due(request)]
            if not victims:
                self._shares.blocked(view, request)
        mode: Preemption = "pause" if need == "seat" else "recompute"
        return Victims(tuple(other.sequence_id for other in victims), mode) if victims else Stop()

    def on_event(self, event: Event) -> None:
        if event.finish_reason is not None:
            self._live.pop(event.request_id, None)


def _due(request: RequestView) -> float:
    return math.inf if request.deadline_s is None else request.deadline_s


def _rank(request: RequestView) -> tuple[float, float, int]:
    return _due(request), *arrival(request)
