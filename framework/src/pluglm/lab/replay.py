"""Drives an engine along a trace: submits and cancels what is due, steps, and notes how every request ended.

Arrivals are open loop: they do not wait for the engine. One thread does it all, so a request that arrives during a step
is submitted after it; its times count from its own arrival.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from pluglm.engine import Engine
from pluglm.kernel.core import Event, FinishReason
from pluglm.kernel.errors import ComponentFailure, RequestError
from pluglm.kernel.interfaces.services import Progress
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.lab.clocks import Clock
from pluglm.lab.steps import StepLog
from pluglm.lab.trace import Trace, TraceRequest, prompt_token_ids
from pluglm.verification.counts import SpeculationCounts

SHORTEST_DEADLINE_S = 1e-9  # of a request whose deadline passed while the engine was busy with a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request ended. Times are seconds after the begin of the trace; None where there was no such moment.

    `not_sent` is a turn whose session had ended: the turn before it was refused, failed, cancelled or too late.
    """

    request: TraceRequest
    finish_reason: FinishReason | Literal["not_sent"]
    error: str | None = None
    arrival_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_prompt: int = 0
    num_output: int = 0
    num_preemptions: int = 0
    num_cached: int = 0
    num_recomputed: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def completed(self) -> bool:
        """It got all that it asked for."""
        return self.finish_reason in ("stop", "length")

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token."""
        if self.first_token_s is None or self.arrival_s is None:
            return None
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
        if self.first_token_s is None or self.finished_s is None or self.num_output < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output - 1)

    @property
    def total_s(self) -> float | None:
        """From its arrival to its end."""
        return None if self.finished_s is None or self.arrival_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class _Live:
    request: TraceRequest
    arrival_s: float
    prompt: list[int]


class Replay:
    """One trace on one engine, once. `log` is the one that the engine's recorder hook fills."""

    def __init__(self, engine: Engine, clock: Clock, trace: Trace, log: StepLog, progress: Progress) -> None:
        self._engine, self._clock, self._log, self._progress = engine, clock, log, progress
        self._core = engine.core
        self._trace = trace
        self._due: list[tuple[float, int, str, TraceRequest]] = []  # (time, position in the heap's history, what)
        self._live: dict[str, _Live] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._followers: dict[str, list[TraceRequest]] = defaultdict(list)
        self._history: dict[str, list[int]] = {}  # prompt and output of ended requests that others follow
        self._num_pushed = 0
        self._start_s = 0.0

    def run(self) -> list[Outcome]:
        """The outcomes in the order of the trace, one for each request."""
        for one in self._trace:
            if one.after is None:
                self._push(one.arrival_s, "submit", one)
            else:
                self._followers[one.after].append(one)
        self._start_s = self._clock.now()
        self._progress("requests", 0, len(self._trace))
        while self._due or self._live:
            self._do_due()
            if self._live:
                self._step()
            elif self._due:
                self._clock.wait_until(self._start_s + self._due[0][0])
            self._progress("requests", len(self._outcomes), len(self._trace))
        return [self._outcomes[one.request_id] for one in self._trace]

    def _push(self, time_s: float, what: str, request: TraceRequest) -> None:
        heapq.heappush(self._due, (time_s, self._num_pushed, what, request))
        self._num_pushed += 1

    def _do_due(self) -> None:
        now_s = self._clock.now()
        while self._due and self._start_s + self._due[0][0] <= now_s:  # as wait_until was asked, to the last bit
            time_s, _, what, request = heapq.heappop(self._due)
            if what == "submit":
                self._submit(request, time_s, now_s - self._start_s)
            else:
                self._engine.cancel(request.request_id)

    def _submit(self, request: TraceRequest, arrival_s: float, now_s: float) -> None:
        num_ids = self._core.parts.num_ids
        before = self._history.get(request.after, []) if request.after is not None else []
        prompt = before + prompt_token_ids(request.prompt, num_ids)
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, seed=0)
        deadline_s = request.deadline_s
        if deadline_s is not None:
            deadline_s = max(arrival_s + deadline_s - now_s, SHORTEST_DEADLINE_S)
        try:
            self._engine.submit(
                {"prompt_token_ids": prompt},
                params,
                request_id=request.request_id,
                priority=request.priority,
                tenant=request.tenant,
                deadline_s=deadline_s,
                salt=request.salt,
            )
        except (RequestError, ComponentFailure) as error:
            reason: FinishReason = "refused" if isinstance(error, RequestError) else "error"
            self._end(
                Outcome(
                    request=request,
                    finish_reason=reason,
                    error=str(error),
                    arrival_s=arrival_s,
                    finished_s=now_s,
                    num_prompt=len(prompt),
                )
            )
            return
        self._live[request.request_id] = _Live(request, arrival_s, prompt)
        if request.cancel_s is not None:
            self._push(arrival_s + request.cancel_s, "cancel", request)

    def _step(self) -> None:
        before_s, num_before = self._clock.now(), len(self._log.steps)
        self._engine.step()
        self._log.took(self._clock.now() - before_s)
        for request_id in [one for one in self._live if not self._core.is_live(one)]:
            self._collect(self._live.pop(request_id))
        if self._live and len(self._log.steps) == num_before:
            self._clock.stepped_idly()

    def _collect(self, live: _Live) -> None:
        """The outcome of a request whose last event is there to be read."""
        events = list(self._engine.events(live.request.request_id))
        outcome = _outcome(live, events[-1], self._start_s)
        if outcome.completed and live.request.request_id in self._followers:
            output = [token for event in events for token in event.token_ids]
            self._history[live.request.request_id] = live.prompt + output
        self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        """Note it; the turn behind it arrives later, or never."""
        ended = [outcome]
        for one in ended:  # grows while it is read
            self._outcomes[one.request.request_id] = one
            for follower in self._followers.get(one.request.request_id, ()):
                if one.completed and one.finished_s is not None:
                    self._push(one.finished_s + follower.arrival_s, "submit", follower)
                else:
                    ended.append(Outcome(request=follower, finish_reason="not_sent"))


def _outcome(live: _Live, event: Event, start_s: float) -> Outcome:
    metrics = event.metrics
    if metrics is None or event.finish_reason is None:
        raise RuntimeError(f"the last event of request '{event.request_id}' is not a terminal one")
    first = metrics.first_token_s
    return Outcome(
        request=live.request,
        finish_reason=event.finish_reason,
        error=event.error,
        arrival_s=live.arrival_s,
        first_token_s=None if first is None else first - start_s,
        finished_s=metrics.finished_s - start_s,
        num_prompt=metrics.num_prompt_tokens,
        num_output=metrics.num_output_tokens,
        num_preemptions=metrics.num_preemptions,
        num_cached=metrics.num_cached_tokens,
        num_recomputed=metrics.num_recomputed_tokens,
        speculation=metrics.speculation,
    )
