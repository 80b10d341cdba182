"""Who is in the engine: live sequences by id, by request and by state, and what schedulers see of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pluglm.kernel.core import CacheKey, Request, RequestView, Sequence, Status, new_view

Probe = Callable[[CacheKey], int]


@dataclass(slots=True)
class Lanes:
    """The sequences of one request: one for each of its n outputs, once the prompt is computed."""

    live: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)


class Roster:
    """Every live sequence is running or waiting, and in the lanes of its request."""

    def __init__(self, probe: Probe | None) -> None:
        self.running: dict[int, Sequence] = {}  # in admission order
        self.waiting: dict[int, Sequence] = {}
        self.requests: dict[str, Lanes] = {}
        self.deadlines: dict[str, float] = {}
        self.held_out: set[int] = set()  # waiting ones whose KV is on its way: schedulers see them, to no avail
        self._waiting_views: dict[int, RequestView] = {}
        self._probe = probe
        self._next_id = 0

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def add(self, sequence: Sequence) -> None:
        """A new sequence, waiting."""
        request = sequence.request
        self.requests.setdefault(request.request_id, Lanes()).live.append(sequence)
        if request.deadline_s is not None:
            self.deadlines[request.request_id] = request.deadline_s
        self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self.running.pop(sequence.sequence_id, None)
        self.waiting[sequence.sequence_id] = sequence
        self.refresh(sequence)

    def run(self, sequence_id: int) -> Sequence | None:
        """Move a waiting sequence to those that run; None when it does not wait."""
        sequence = self.waiting.pop(sequence_id, None)
        if sequence is not None:
            del self._waiting_views[sequence_id]
            sequence.status = Status.RUNNING
            self.running[sequence_id] = sequence
        return sequence

    def refresh(self, sequence: Sequence) -> None:
        """A waiting sequence changed what schedulers see of it: nothing, with no KV to lose and none to compute."""
        if sequence.parked is None or sequence.holds_kv:
            self._waiting_views[sequence.sequence_id] = view_of(sequence, self._probe)
        else:
            self._waiting_views.pop(sequence.sequence_id, None)

    def end(self, sequence: Sequence) -> None:
        """Take it out, and its request with the last of its lanes."""
        sequence.status = Status.FINISHED
        self.running.pop(sequence.sequence_id, None)
        self.waiting.pop(sequence.sequence_id, None)
        self._waiting_views.pop(sequence.sequence_id, None)
        request_id = sequence.request.request_id
        lanes = self.requests[request_id]
        lanes.live.remove(sequence)
        lanes.ended.append(sequence)
        if not lanes.live:
            del self.requests[request_id]
            self.deadlines.pop(request_id, None)

    def live(self) -> list[Sequence]:
        return [*self.running.values(), *self.waiting.values()]

    def late(self, now_s: float) -> list[str]:
        """Requests whose deadline has passed."""
        return [name for name, deadline_s in self.deadlines.items() if now_s > deadline_s]

    def running_views(self) -> tuple[RequestView, ...]:
        return tuple([view_of(one, None) for one in self.running.values()])

    def waiting_views(self) -> tuple[RequestView, ...]:
        """In arrival order. They change only when a sequence comes to wait, so they are kept."""
        views, held_out = self._waiting_views, self.held_out
        seen = (replace(view, is_held_out=True) if one in held_out else view for one, view in views.items())
        return tuple(sorted(seen if held_out else views.values(), key=_arrival))

    def queued(self) -> Iterable[Request]:
        """Requests that have never run."""
        fresh = (one for one in self.waiting.values() if not one.num_computed and not one.num_preemptions)
        return (one.request for one in fresh if not one.lane and not one.num_output)


def _arrival(view: RequestView) -> tuple[float, int]:
    return view.arrival_s, view.sequence_id


def view_of(sequence: Sequence, probe: Probe | None) -> RequestView:
    """What schedulers see of it in this step. probe: of the prefix cache, None where nothing may be adopted.

    At least the last known token is always computed, since its logits are needed.
    """
    request, num_known = sequence.request, len(sequence.token_ids)
    may_adopt = probe is not None and num_known > 1 and not sequence.num_computed and not sequence.holds_kv
    return new_view(
        sequence.sequence_id,
        request.request_id,
        request.tenant,
        request.priority,
        request.arrival_s,
        len(request.prompt_token_ids),
        num_known,
        sequence.num_computed,
        len(sequence.drafts),
        len(sequence.output_token_ids),
        request.max_new_tokens,
        sequence.num_preemptions,
        sequence.lane,
        request.deadline_s,
        sequence.holds_kv,
        cache_key=CacheKey(sequence.namespace, sequence.token_ids, num_known - 1) if may_adopt else None,
        probe=probe,
    )
