"""First come, first served: preferences of the kernel's planner. Knows arrival order; knows nothing of priorities."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Need, Reject, SchedulingPolicy, Skip, Stop, Victims
from pluglm_schedulers.ranks import arrival, behind, is_running, started_since
from pluglm_schedulers.step_shares import StepShares

if TYPE_CHECKING:
    from pluglm.kernel.core import Event, RequestView, StepView


class FcfsConfig(ComponentConfig):
    """long_prefill_share: part of a step's prompt tokens that one of several prompts may take while others want some.

    skip_blocked: waiting requests without room in the KV that later ones may pass in one step; 0 is none.
    max_skips: steps in which one request may be passed; then it holds back all behind it.
    """

    long_prefill_share: float = Field(default=0.5, gt=0, le=1)
    skip_blocked: int = Field(default=0, ge=0)
    max_skips: int = Field(default=16, ge=1)


class FcfsPolicy(SchedulingPolicy):
    """Requests are served in arrival order, ties by sequence id; decodes before chunks of prompts.

    A prompt that needs more tokens than the decodes of a step leave takes at most long_prefill_share of them, and what
    other prompts leave over: one gets no tokens only while 1 / long_prefill_share earlier ones take them all. The
    default of a half slows down neither side more than twofold: those behind a long prompt get as much as it does.

    A waiting request without room in the KV holds back all behind it, so a large one never starves. With skip_blocked,
    later arrivals may start ahead of it in at most max_skips steps, as many in each as seats are free. One without a
    seat always holds back the others. A running request that needs KV takes it from those that arrived after it, the
    latest first; nobody loses a seat or KV to a later arrival.
    """

    interface_version = 1
    Config = FcfsConfig

    def __init__(self, config: FcfsConfig, context: BuildContext) -> None:
        self._shares = StepShares(config.long_prefill_share)
        self._skip_blocked, self._max_skips = config.skip_blocked, config.max_skips
        self._last: StepView | None = None
        self._skipped: set[int] = set()  # in the last step
        self._num_skips: dict[int, int] = {}  # steps in which a waiting request was passed

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        if self._skip_blocked:
            self._count_skips(view)
        return self._shares.in_turn(view, sorted(view.running, key=arrival))

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return self._shares.queue(view, sorted(view.waiting, key=arrival))

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return self._shares.share(request, tokens_left)

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """A running request: those after it, the latest first. A waiting one: Stop, or Skip within the two limits."""
        if is_running(view, request):
            victims = tuple(other.sequence_id for other in behind(view, request, arrival))
            return Victims(victims) if victims else Stop()
        if need == "kv" and self._may_skip(request.sequence_id):
            return Skip()
        self._shares.blocked(view, request)
        return Stop()

    def on_event(self, event: Event) -> None:
        """Nothing is counted."""

    def checkpoint(self) -> Callable[[], None]:
        restore_shares, saved = self._shares.checkpoint(), (self._last, set(self._skipped), dict(self._num_skips))

        def restore() -> None:
            restore_shares()
            self._last, self._skipped, self._num_skips = saved

        return restore

    def _may_skip(self, sequence_id: int) -> bool:
        """Asked more than once in a step, it gives the same answer."""
        if sequence_id not in self._skipped:
            few = len(self._skipped) < self._skip_blocked and self._num_skips.get(sequence_id, 0) < self._max_skips
            if not few:
                return False
            self._skipped.add(sequence_id)
        return True

    def _count_skips(self, view: StepView) -> None:
        """One for whoever was skipped while a later arrival left the queue; those that do not wait are forgotten."""
        last, self._last = self._last, view
        if last is None or last.step == view.step:
            return
        left = max(map(arrival, started_since(last.waiting, view)), default=None)
        counts = {}
        for one in view.waiting:
            count = self._num_skips.get(one.sequence_id, 0)
            passed = one.sequence_id in self._skipped and left is not None and arrival(one) < left
            if count or passed:
                counts[one.sequence_id] = count + passed
        self._num_skips, self._skipped = counts, set()
