"""I9, I10 and I12: who is let in, how each request ends, and that its tokens are those of a run alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from trace_case import Arrival, Trace
from trace_choices import pool_tokens
from trace_parts import Rig, letter
from trace_play import Frame, ViolationError, Watcher

from pluglm.kernel.core import Event, Sequence

CALLERS_OWN = ("cancelled", "deadline", "error", "refused")  # ends that cut a lane short


@dataclass(slots=True)
class Record:
    """What the caller has seen of one request. ended: the reason of each lane that is over."""

    arrival: Arrival
    first_lane: Sequence
    max_new: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    expected: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    is_over: bool = False
    was_cancelled: bool = False
    was_planned: bool = False


class EndsWatch(Watcher):
    """Keeps a record of every request that was let in, made of the events alone."""

    def __init__(self, trace: Trace, rig: Rig, counts: Counter[str]) -> None:
        self._trace, self._rig, self._core, self._counts = trace, rig, rig.core, counts
        pool = pool_tokens(trace.kv_config)
        self._limit = min(trace.max_model_len, rig.kv.max_request_tokens() if pool is None else pool)
        self._lanes: dict[tuple[str, int], Sequence] = {}
        self._preemptions: Counter[str] = Counter()
        self._now_s = 0.0
        self.records: dict[str, Record] = {}

    def arrived(self, arrival: Arrival, refused: str | None) -> None:
        self._counts["requests"] += 1
        must, may = self._reasons_to_refuse(arrival)
        if refused is not None:
            self._counts["refused at the door"] += 1
            if must is None and not any(words in refused for words in may):
                raise ViolationError("I9", f"{arrival.name} fits and was refused: {refused}")
            if must is not None and not any(words in refused for words in (*must, *may)):
                raise ViolationError("I9", f"{arrival.name} was refused without the numbers {must}: {refused}")
            return
        if must is not None:
            raise ViolationError("I9", f"{arrival.name} can never fit the {self._limit} tokens and was let in")
        if self._must_queue_refuse(arrival):
            raise ViolationError("I9", f"{arrival.name} was let in although the queue is full")
        lane = next(one for one in self._core.roster.live() if one.request.request_id == arrival.name)
        room = self._limit - len(arrival.prompt)
        wanted = room if arrival.max_tokens is None else min(room, arrival.max_tokens)
        if lane.request.max_new_tokens != wanted:
            raise ViolationError("I9", f"{arrival.name} may have {lane.request.max_new_tokens} tokens, not {wanted}")
        self.records[arrival.name] = Record(arrival, lane, wanted)

    def _reasons_to_refuse(self, arrival: Arrival) -> tuple[tuple[str, ...] | None, list[str]]:
        """What a refusal that has to come may say, and what any other one must."""
        num_prompt, limit = len(arrival.prompt), self._limit
        may = ["the engine has stopped"] if self._trace.when_kv_full == "exit" else []
        if self._must_queue_refuse(arrival):
            may.append("wait already")
        if self._core.parts.policy is not None:
            may.append("refuses it")
        if num_prompt >= limit:
            return (f"{num_prompt} tokens and", f"holds {limit} tokens"), may
        if arrival.max_tokens is not None and num_prompt + arrival.max_tokens > limit and not arrival.clip:
            return (f"prompt {num_prompt} + max_tokens {arrival.max_tokens}",), may
        return None, may

    def _must_queue_refuse(self, arrival: Arrival) -> bool:
        queued = [one for one in self.records.values() if not one.is_over and not one.was_planned]
        num_tokens = sum(len(one.arrival.prompt) for one in queued) + len(arrival.prompt)
        most, most_tokens = self._trace.max_waiting_requests, self._trace.max_waiting_tokens
        return (most is not None and len(queued) >= most) or (most_tokens is not None and num_tokens > most_tokens)

    def cancelled(self, name: str, was_live: bool) -> None:
        record = self.records.get(name)
        if was_live != (record is not None and not record.is_over):
            raise ViolationError("I10", f"cancelling {name} said {was_live}")
        if record is None or record.is_over:
            return
        record.was_cancelled = True
        self._counts["cancelled"] += 1
        if self._core.is_live(name):
            raise ViolationError("I10", f"{name} lives on after it was cancelled")

    def closing(self) -> None:
        for record in self.records.values():
            record.was_cancelled |= not record.is_over

    def before_step(self, step: int) -> None:
        self._now_s = self._core.now()

    def after_step(self, frame: Frame) -> None:
        for one in self._core.roster.live():
            self._lanes[one.request.request_id, one.lane] = one
        if frame.view is not None and frame.plan is not None:
            names = {one.sequence_id: one.request_id for one in (*frame.view.running, *frame.view.waiting)}
            for item in frame.plan.items:
                self.records[names[item.sequence_id]].was_planned = True
            ended = {names[one] for one, _ in frame.plan.refused}  # first of all, so nobody of it is preempted
            for lost in (*frame.plan.preempted, *frame.plan.offloaded, *frame.plan.paused):
                is_over = names[lost] in ended or (ended and self._trace.when_kv_full == "exit")
                self._preemptions[names[lost]] += not is_over
        for event in frame.events:
            self._see(event)
        for name, record in self.records.items():
            if record.was_cancelled and not record.is_over:
                raise ViolationError("I10", f"{name} was cancelled and has no last event a step later")
            if not record.is_over and not self._core.is_live(name):
                raise ViolationError("I10", f"{name} is gone without a last event")

    def _see(self, event: Event) -> None:
        record = self.records.get(event.request_id)
        if record is None or record.is_over or event.lane in record.ended:
            raise ViolationError("I10", f"an event of {event.request_id}, lane {event.lane}, after its end: {event}")
        tokens = record.tokens.setdefault(event.lane, [])
        tokens += event.token_ids
        if self._rig.has_letters and event.text != "".join(map(letter, event.token_ids)):
            raise ViolationError("I10", f"{event.request_id} got text '{event.text}' for tokens {event.token_ids}")
        self._compare(record, event.lane, tokens)
        if event.lane_finish_reason is not None:
            record.ended[event.lane] = event.lane_finish_reason
            self._check_lane_end(record, event, tokens)
        if event.finish_reason is not None:
            record.is_over = True
            self._check_end(record, event)

    def _compare(self, record: Record, lane: int, tokens: list[int]) -> None:
        """What came so far is what a run alone gives; a lane ends at its first EOS, or at its length."""
        expected = record.expected.get(lane)
        if expected is None and tokens:
            expected = record.expected[lane] = self._alone(record, lane)
        if tokens and tokens != (expected or [])[: len(tokens)]:
            raise ViolationError("I12", f"{record.arrival.name}, lane {lane}: {tokens}, alone it gives {expected}")

    def _alone(self, record: Record, lane: int) -> list[int]:
        if record.arrival.search is not None:
            results = self._rig.search_form(record.first_lane) or []
            return list(results[lane]) if lane < len(results) else []
        sequence = self._lanes.get((record.arrival.name, lane), record.first_lane)
        expected = self._rig.closed_form(sequence, record.max_new)
        stops = [i for i, one in enumerate(expected) if self._stops(record, one)]
        return expected[: stops[0] + 1] if stops else expected

    def _stops(self, record: Record, token: int) -> bool:
        return not record.arrival.ignore_eos and token in self._core.parts.eos_token_ids

    def _check_lane_end(self, record: Record, event: Event, tokens: list[int]) -> None:
        name, reason = record.arrival.name, event.lane_finish_reason
        self._counts[f"lanes ended: {reason}"] += 1
        if reason in ("stop", "length"):
            expected = record.expected.get(event.lane, [])
            stopped = expected != [] and self._stops(record, expected[-1])
            if tokens != expected or (reason == "stop") != stopped:
                raise ViolationError("I12", f"{name}, lane {event.lane}: {reason} after {tokens}, alone {expected}")
            return
        late = record.first_lane.request.deadline_s
        too_few = record.arrival.search is not None and self._rig.search_form(record.first_lane) is None
        allowed = {
            "cancelled": record.was_cancelled,
            "deadline": late is not None and self._now_s > late,
            "error": bool(self._trace.faults) or self._trace.when_kv_full == "exit" or too_few,
            "refused": self._trace.when_kv_full == "refuse",
        }
        if "planned nothing in" in (event.error or ""):
            raise ViolationError("I8", f"{name} ended: {event.error}")
        if not allowed.get(str(reason), False):
            raise ViolationError("error", f"{name} ended with {reason}: {event.error}")

    def _check_end(self, record: Record, event: Event) -> None:
        name, metrics = record.arrival.name, event.metrics
        is_search = record.arrival.search is not None
        forked = record.arrival.n if is_search or record.tokens.get(0) else 1
        lanes = set(range(forked))
        cut_short = event.finish_reason in CALLERS_OWN
        if record.ended.keys() != lanes and not (cut_short and record.ended.keys() == {0}):
            raise ViolationError("I10", f"{name} ended with lanes {sorted(record.ended)} of {sorted(lanes)}")
        if event.finish_reason != event.lane_finish_reason or metrics is None:
            raise ViolationError("I10", f"the last event of {name} is {event}")
        seen = (sum(map(len, record.tokens.values())), self._preemptions[name])
        if seen != (metrics.num_output_tokens, metrics.num_preemptions):
            raise ViolationError("I10", f"{name}: {seen} tokens and preemptions, its metrics say {metrics}")
        if self._core.is_live(name):
            raise ViolationError("I10", f"{name} lives on after its last event")

    def drained(self) -> None:
        core, drafter = self._core, self._rig.drafter
        missing = [name for name, record in self.records.items() if not record.is_over]
        left = {
            "requests without an end": missing,
            "running": core.roster.running,
            "waiting": core.roster.waiting,
            "requests": core.roster.requests,
            "deadlines": core.roster.deadlines,
            "text streams": core._streams,
            "KV held back": core.memory.held_back,
            "held out of plans": core.roster.held_out,
            "offloaded bytes": self._trace.offload_bytes - core.memory._host_bytes_left,
            "drafters' states": drafter.known if drafter else (),
        }
        if any(left.values()):
            raise ViolationError("I10", f"left behind: { {name: value for name, value in left.items() if value} }")


class PreemptionAlarm(Watcher):
    """No request is preempted more often than others can have needed its room.

    A running request takes KV from others, or gives up for want of it, only to compute its newest token: once for each
    output token at most. A waiting one takes seat or KV once for each time that it comes to wait. So a request's
    preemptions are at most all output tokens, and once for each other request and each of their preemptions. That holds
    where victims follow a fixed order; schedulers that draw them are counted and not judged.
    """

    def __init__(self, trace: Trace, rig: Rig, counts: Counter[str]) -> None:
        self._core, self._counts = rig.core, counts
        self._is_judged = not trace.policy.startswith("test:")
        self._lanes: dict[int, Sequence] = {}
        self.most = 0

    def after_step(self, frame: Frame) -> None:
        self._lanes |= {one.sequence_id: one for one in self._core.roster.live()}

    def drained(self) -> None:
        times = [one.num_preemptions for one in self._lanes.values()]
        self.most = max(times, default=0)
        for count in times:
            self._counts[f"preempted {'4 times or more' if count >= 4 else f'{count} times'}"] += 1
        others = max(0, len(times) - 1) + sum(times) - self.most
        bound = sum(one.num_output for one in self._lanes.values()) + others
        if self._is_judged and self.most > bound:
            raise ViolationError("alarm", f"one sequence was preempted {self.most} times, {bound} could be needed")
