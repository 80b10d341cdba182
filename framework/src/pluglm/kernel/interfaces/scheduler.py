"""The contracts of scheduling: a whole planner, and the small seam of preferences that the kernel's planner asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    from pluglm.kernel.core import Budget, Event, RequestView, StepPlan, StepView
    from pluglm.kernel.interfaces.kv import KVTransaction

SCHEDULER_VERSION = 1
POLICY_VERSION = 1

Need = Literal["kv", "seat"]
Preemption = Literal["recompute", "offload", "pause"]


class Scheduler(Component, Protocol):
    """Replaces the planner. Everything it returns passes the kernel's validator, which refuses items one by one."""

    def plan(self, view: StepView, budget: Budget, kv: KVTransaction) -> StepPlan:
        """Choose this step's tokens. In `kv`, for every item the KV must have been extended to computed + num_tokens,
        and everyone preempted or offloaded released. A waiting sequence is acquired first, unless it holds KV; what
        `acquire` returns for its cache_key (0 without one) counts as computed. The kernel commits or rolls back."""
        ...


@dataclass(frozen=True, slots=True)
class Accept:
    """The request may queue."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The request ends with `refused` and this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing behind the blocked request is looked at in this step."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The blocked request waits; those behind it may go ahead."""


@dataclass(frozen=True, slots=True)
class Victims:
    """Preempt these running sequences, in this order, as far as needed.

    mode: they compute their tokens again later, get their KV back from host memory, or keep it and lose only the seat.
    A pause gives no room to a request that needs KV, so there it is taken for "recompute".
    """

    sequence_ids: tuple[int, ...]
    mode: Preemption = "recompute"


class SchedulingPolicy(Component, Protocol):
    """Preferences only; the kernel owns every mutation and every invariant."""

    def admit(self, request: RequestView, num_waiting: int) -> Accept | Reject:
        """Called once, when a request arrives and could fit."""
        ...

    def order_running(self, view: StepView) -> Iterable[int]:
        """Sequence ids of view.running, most deserving first. Ids left out get nothing in this step.

        The kernel serves decodes, which have one known token to compute, before prompts, each in this order.
        """
        ...

    def order_waiting(self, view: StepView) -> Iterable[int]:
        """Sequence ids of view.waiting, most deserving first. Lazy: the kernel stops pulling early."""
        ...

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        """Tokens for this request now, 0 to skip it; the kernel clips to what is pending and left."""
        ...

    def on_blocked(self, view: StepView, request: RequestView, need: Need) -> Stop | Skip | Victims:
        """The request cannot run for want of KV blocks or a seat."""
        ...

    def on_event(self, event: Event) -> None:
        """Every event of every request, for policies that count."""
        ...


@runtime_checkable
class PlansAhead(Protocol):
    """Optional ability of a Scheduler or a SchedulingPolicy: it may be asked about a step that then does not come.

    Who has it promises that a plan depends on the budget, the transaction's answers, the views but for their clock
    and cached prefixes, and what earlier plans left in it; `admit` and `on_event` neither read that nor change it.
    The promise is not inherited: a subclass that keeps it has a `checkpoint` of its own.
    """

    def checkpoint(self) -> Callable[[], object]:
        """What takes back all that is asked from here on, as if it had never been. Called before a step is planned
        ahead, and what it returns at most once, before the next plan; its cost is hidden, that of the latter is not."""
        ...
