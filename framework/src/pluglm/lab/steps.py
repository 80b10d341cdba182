"""What each step of a run did and how long it took: a hook that notes the plans, and the log that it fills."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from pluglm.backends.fake import keys_seen
from pluglm.kernel.config import Slot
from pluglm.kernel.core import PlanItem, RequestView, StepPlan, StepView
from pluglm.kernel.hooks import hookimpl
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.lab.amounts import Strict

Count = Annotated[int, Field(strict=True, ge=0)]
Sum = Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False)]  # of many numbers, each within its bounds


class Work(NamedTuple):
    """What one step computes: tokens, rows with logits, sequences with several tokens, keys seen by all tokens."""

    num_tokens: int = 0
    num_rows: int = 0
    num_chunks: int = 0
    num_keys: int = 0


NOTHING = Work()


class Step(Strict):
    """One step that computed something, and how long it took."""

    seconds: Sum
    num_tokens: Count
    num_rows: Count
    num_chunks: Count
    num_keys: Count


@dataclass(slots=True)
class StepLog:
    """Steps in order. Written by the recorder (work) and by whoever steps the engine (seconds)."""

    steps: list[Step] = field(default_factory=list)
    num_empty: int = 0  # steps that computed nothing
    _work: Work = NOTHING
    _decisions: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    @property
    def decisions(self) -> str:
        """A digest of every plan so far, in hexadecimal: equal in two runs exactly when they planned the same."""
        return str(self._decisions.hexdigest())

    def planned(self, view: StepView, plan: StepPlan) -> None:
        known = {one.sequence_id: one for one in (*view.running, *view.waiting)}
        waiting = {one.sequence_id for one in view.waiting}
        self._work = _sum(item_work(item, known[item.sequence_id], item.sequence_id in waiting) for item in plan.items)
        self._decisions.update(repr((view.step, plan)).encode())

    def clear(self) -> None:
        """Forget everything, such as a warm-up."""
        self.steps, self.num_empty, self._work = [], 0, NOTHING
        self._decisions = hashlib.blake2b(digest_size=16)

    def took(self, seconds: float) -> None:
        """The step that was planned last, or one that planned nothing, is over."""
        work, self._work = self._work, NOTHING
        if work.num_tokens:
            self.steps.append(Step(seconds=seconds, **work._asdict()))
        else:
            self.num_empty += 1


def item_work(item: PlanItem, request: RequestView, starts: bool) -> Work:
    """Of one planned sequence. One that starts may adopt a cached prefix, which is not computed.

    The cache is asked after the plan, when an eviction in the same step may have changed the answer; that is rare.
    """
    computed = request.num_computed
    if starts and not request.holds_kv:
        computed = max(computed, request.cached_prefix())
    undrafted = request.num_known - computed
    rows = max(0, item.num_tokens - undrafted + 1)
    return Work(item.num_tokens, rows, int(item.num_tokens > 1), keys_seen(computed, item.num_tokens))


def _sum(works: Iterable[Work]) -> Work:
    columns = list(zip(*works, strict=True))
    return Work(*map(sum, columns)) if columns else NOTHING


class StepRecorderConfig(ComponentConfig):
    """log: a live StepLog; it is no part of the plan."""

    log: Any = Field(exclude=True, repr=False)


class StepRecorder:
    """A hook that writes every plan into the log of its config."""

    Config: ClassVar[type[StepRecorderConfig]] = StepRecorderConfig
    interface_version: ClassVar[int] = 1

    def __init__(self, config: StepRecorderConfig) -> None:
        self._log: StepLog = config.log

    @hookimpl
    def step_planned(self, view: StepView, plan: StepPlan) -> None:
        self._log.planned(view, plan)


def recorder_slot(log: StepLog) -> Slot:
    """The entry of a config's `hooks` that fills the log."""
    return Slot(use=f"{__name__}:{StepRecorder.__name__}", log=log)
