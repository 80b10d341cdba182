"""The engine loop: plan, execute, sample, commit. It owns every sequence's state; plugins return values."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from pluglm.kernel import admission, drafting
from pluglm.kernel.core import Chunk, Event, FinishReason, Request, Sequence, Status, new_event
from pluglm.kernel.drawing import Drawer, Drawn, Window, follow
from pluglm.kernel.ending import ending, metrics_of
from pluglm.kernel.errors import ComponentFailure, RequestError, describe
from pluglm.kernel.guard import Guarded
from pluglm.kernel.interfaces.drafter import Drafter
from pluglm.kernel.interfaces.kv import KVManager
from pluglm.kernel.interfaces.services import TextStream
from pluglm.kernel.memory import Memory, write_blocks
from pluglm.kernel.parts import Parts
from pluglm.kernel.planning import Planning, Step
from pluglm.kernel.roster import Roster
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.kernel.searching import Searching

logger = logging.getLogger("pluglm")
ResultT = TypeVar("ResultT")


class EngineCore:
    """Drives requests to their one terminal event. Not thread-safe: callers take turns."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.kv: KVManager = parts.runner.kv
        self.memory = Memory(parts, self)
        self.roster = Roster(None if parts.prefix_cache is None else parts.prefix_cache.probe)
        self._drawer = Drawer(parts, self.attempting)
        self._streams: dict[int, TextStream] = {}
        self._events: list[Event] = []
        self._planning = (parts.planning or Planning)(parts, self.roster, self.memory, self)
        self._searching = Searching(parts, self.roster, self.memory, self)
        self._step_index = 0

    def now(self) -> float:
        return self.parts.runner.backend.now()

    def add(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
        salt: str = "",
    ) -> Request:
        """Queue a request. Raises RequestError (nothing queued) when it can never run or the policy refuses it.

        deadline_s: seconds from now.
        """
        if self._planning.stopped:
            raise RequestError(f"request '{request_id}': the engine has stopped: {self._planning.stopped}")
        now = self.now()
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            arrival_s=now,
            max_new_tokens=0 if params.max_tokens is None else params.max_tokens,
            priority=priority,
            tenant=tenant,
            deadline_s=None if deadline_s is None else now + deadline_s,
            salt=salt,
        )
        sequence = admission.admit(request, self.parts, self.roster)
        self._streams[sequence.sequence_id] = self.parts.text_stream(params)
        self.roster.add(sequence)
        self.parts.hooks.call("request_admitted", request=sequence.request)
        return sequence.request

    def cancel(self, request_id: str) -> bool:
        """End a request with `cancelled`; its event comes with the next step. False when it is not live."""
        is_live = self.is_live(request_id)
        self._end(request_id, "cancelled")
        return is_live

    def is_live(self, request_id: str) -> bool:
        return request_id in self.roster.requests

    def step(self) -> list[Event]:
        """Advance every request as the scheduler sees fit. Never raises for what a plugin does."""
        return self.parts.guard.run(self._step())

    def _step(self) -> Guarded[list[Event]]:
        started = self.now()
        self.memory.return_held_back()
        for request_id in self.roster.late(started):
            self._end(request_id, "deadline")
        yield from self._propose()
        self.parts.tiers.before_plan(self)
        step = yield from self._planning.plan(self._step_index)
        self.parts.tiers.after_commit(self)
        logits_RV = yield from self._execute(step)
        drawn = yield from self._sample(step, logits_RV)
        going_on = self._commit(step, drawn)
        self._searching.advance([sequence.request.request_id for sequence in step.searched])
        # only now, so that what was drawn is committed where it is interrupted
        if (drafter := self.parts.drafter) is not None and going_on:
            yield from self._observe(drafter, going_on)
        self.parts.tiers.after_step(self, [count for _, count in step.items])
        num_tokens = sum(count for _, count in step.items)
        self.parts.hooks.call("step_done", step=self._step_index, seconds=self.now() - started, num_tokens=num_tokens)
        self._step_index += 1
        return (yield from self._deliver())

    def _deliver(self) -> Guarded[list[Event]]:
        """The step's events, shown to the policy and the hooks before the callers get them."""
        events, self._events = self._events, []
        if (policy := self.parts.policy) is not None and events:
            yield from self.attempting("scheduler", (), lambda: list(map(policy.on_event, events)))
        for event in events:
            self.parts.hooks.call("event_emitted", event=event)
        return events

    def close(self) -> list[Event]:
        """Cancel what runs; returns its last events. Nothing may be called afterwards."""
        self.end_all("cancelled")
        events = self.parts.guard.run(self._deliver())
        self.parts.hooks.call("run_finished")
        self.parts.tiers.close(self)
        self.parts.guard.close()
        return events

    def attempt(
        self, slot: str, touched: Iterable[Sequence], call: Callable[[], ResultT], undo: Callable[[], Any] = tuple
    ) -> ResultT | None:
        """call() under the guard; when the component fails (None), so do the requests it touched, and nothing else."""
        return self.parts.guard.run(self.attempting(slot, touched, call, undo))

    def attempting(
        self, slot: str, touched: Iterable[Sequence], call: Callable[[], ResultT], undo: Callable[[], Any] = tuple
    ) -> Guarded[ResultT | None]:
        """`attempt` for what is under the guard itself, where it takes no thread of its own."""
        try:
            return (yield self.parts.names[slot], call)  # type: ignore[no-any-return]
        except (ComponentFailure, RequestError, KeyboardInterrupt) as failure:
            undo()
            if isinstance(failure, KeyboardInterrupt):
                raise
            said = failure if isinstance(failure, ComponentFailure) else f"{self.parts.names[slot]} raised {failure}"
            reason = " ".join(str(said).split())
            logger.warning("%s", reason)
            logger.debug("it was raised here:", exc_info=failure.__cause__ or failure)
            for sequence in list(touched):
                self.finish(sequence, "error", error=reason)
            return None

    def _propose(self) -> Guarded[None]:
        """Ask the drafter about every sequence that has nothing but its newest token to compute."""
        drafter, running = self.parts.drafter, self.roster.running
        asked = drafting.requests(running.values(), self.parts.budget) if drafter else []
        if drafter is None or not asked:
            return
        touched = [running[one.sequence_id] for one in asked]
        ask = partial(drafting.ask, drafter, asked, self.parts)
        answers = yield from self.attempting("drafter", touched, ask, self.parts.drafting_failed)
        for sequence, answer in zip(touched, answers or [], strict=False):
            if isinstance(answer, str):
                self.finish(sequence, "error", error=f"{self.parts.names['drafter']} {answer}")
            else:
                sequence.drafts, sequence.proposal = answer.token_ids, answer

    def _execute(self, step: Step) -> Guarded[torch.Tensor | None]:
        """Run the planned tokens; logits of every row from each sequence's last known token on."""
        if not step.items and not step.copies:
            return None
        num_rows = [max(0, sequence.drafts_within(count) + 1) for sequence, count in step.items]
        chunks = [Chunk(s.sequence_id, s.pending(count), s.num_computed, s.num_prompt) for s, count in step.items]
        meanwhile = self._planning.meanwhile(step, self._step_index + 1)

        def run() -> torch.Tensor | None:
            copies, runner = step.copies, self.parts.runner
            if step.restores or not step.items:
                runner.store.copy_blocks(copies)
                copies = ()
                for tables, saved in step.restores:  # after the copies, which may read what it was given
                    write_blocks(runner.store, tables, saved)
            if not step.items:  # who was extended, and then lost its turn, reads the copies later
                return None
            inputs = runner.make_input(chunks, num_rows=num_rows, copies=copies)
            logits_RV = runner.run(inputs) if meanwhile is None else runner.run_beside(inputs, meanwhile)
            got = [*getattr(logits_RV, "shape", ()), getattr(logits_RV, "dtype", type(logits_RV).__name__)]
            asked = [sum(num_rows), runner.spec.vocab_size, torch.float32]
            if got != asked:
                raise ComponentFailure(self.parts.names["step"], f"returned logits {got} where {asked} were asked")
            return logits_RV

        return (yield from self.attempting("backend", self._written_by(step), run))

    def _written_by(self, step: Step) -> Iterator[Sequence]:
        """Whose KV a step writes, asked when it failed: its items, and others that wait for one of its block copies."""
        items, targets = dict.fromkeys(one for one, _ in step.items), {target for _, target in step.copies}
        yield from items
        for sequence in self.roster.live() if targets else ():
            if sequence not in items and sequence.holds_kv and self.memory.holds_any(sequence.sequence_id, targets):
                yield sequence

    def _sample(self, step: Step, logits_RV: torch.Tensor | None) -> Guarded[list[tuple[Window, Drawn]]]:
        """Draws for every window; the rows of lanes under a search are put aside for it."""
        windows = [] if logits_RV is None else step.windows
        if logits_RV is not None and any(window.sequence.walk is not None for window in windows):
            pairs = list(zip(windows, torch.split(logits_RV, [len(one.drafts) + 1 for one in windows]), strict=True))
            step.searched = {window.sequence: row[0] for window, row in pairs if window.sequence.walk is not None}
            windows = [window for window in windows if window.sequence.walk is None]
            logits_RV = torch.cat([row for window, row in pairs if window.sequence.walk is None] or [logits_RV[:0]])
        return (yield from self._planning.draw(self._drawer, logits_RV, windows))

    def _commit(self, step: Step, drawn: list[tuple[Window, Drawn]]) -> list[tuple[Window, Drawn]]:
        """Accepted tokens become known, computed counts follow, and whoever is done ends. Returns who goes on."""
        for sequence, count in step.items:
            if sequence.status is Status.RUNNING:
                sequence.num_computed += min(count, len(sequence.token_ids) - sequence.num_computed)
        for window, result in drawn:
            sequence = window.sequence
            if result.error is not None:
                self.finish(sequence, "error", error=result.error)
            if sequence.status is not Status.RUNNING:
                continue
            sequence.num_computed += result.num_accepted
            sequence.drafts, sequence.proposal = [], None
            self._fork_lanes(sequence)
            if sequence.status is Status.RUNNING:  # forking may have failed it
                self._emit(sequence, len(window.drafts), result)
        going_on = [one for one in drawn if one[0].sequence.status is Status.RUNNING]
        self._park(step)
        self.memory.publish([*(window.sequence for window, _ in going_on), *step.searched])
        return [one for one in going_on if one[0].sequence.status is Status.RUNNING]  # publishing may have failed some

    def _park(self, step: Step) -> None:
        for sequence, logits_V in list(step.searched.items()):
            if sequence.status is Status.RUNNING and not bool(torch.isfinite(logits_V.amax())):
                self.finish(sequence, "error", error=f"{self.parts.names['step']} gave NaN or infinite logits")
            if sequence.status is not Status.RUNNING:
                del step.searched[sequence]
                continue
            sequence.num_sound = sequence.num_computed
            self._searching.park(sequence, logits_V)

    def _fork_lanes(self, parent: Sequence) -> None:
        """Once the prompt is computed, the request's other outputs begin with its KV and wait for seats."""
        request = parent.request
        if request.params.n == 1 or parent.lane or parent.output_token_ids:
            return
        try:  # not an attempt: compiling a grammar for each lane is a guarded call of its own
            children = [admission.new_lane(request, one, self.parts, self.roster) for one in range(1, request.params.n)]
        except (ComponentFailure, RequestError) as failure:
            self.finish(parent, "error", error=describe(failure))
            return
        if not self.memory.fork(parent, children, parent.num_prompt - 1):
            return
        for child in children:
            child.num_computed = child.num_sound = child.num_published = parent.num_prompt - 1
            child.holds_kv, child.kv_epoch = True, parent.kv_epoch
            self._streams[child.sequence_id] = self.parts.text_stream(request.params)
            self.roster.add(child)

    def _emit(self, sequence: Sequence, num_drafts: int, result: Drawn) -> None:
        """Append the drawn tokens one by one up to the first that ends the lane, and tell the caller."""
        stream, text, taken = self._streams[sequence.sequence_id], "", 0
        reason: FinishReason | None = None
        stop: str | int | None = None
        for token in result.token_ids:
            sequence.token_ids.append(token)
            sequence.output_token_ids.append(token)
            taken += 1
            delta = stream.push(token)
            text += delta.text
            matcher = sequence.matcher
            terminated = matcher is not None and self.attempt("grammar", [sequence], partial(follow, matcher, token))
            if terminated is None:
                return
            reason, stop = ending(sequence, token, delta.stopped, terminated, self.parts.eos_token_ids)
            if reason is not None:
                break
        # a stop inside accepted drafts leaves KV behind it that belongs to no text
        sequence.num_computed = sequence.num_sound = min(sequence.num_computed, len(sequence.token_ids))
        if sequence.first_token_s is None:
            sequence.first_token_s = self.now()
        sequence.windows[num_drafts, min(result.num_accepted, taken), taken] += 1
        tokens, logprobs = tuple(result.token_ids[:taken]), tuple(result.logprobs[:taken])
        if reason is None:
            name, lane = sequence.request.request_id, sequence.lane
            self._events.append(new_event(request_id=name, lane=lane, token_ids=tokens, text=text, logprobs=logprobs))
        else:
            self.finish(sequence, reason, stop=stop, token_ids=tokens, text=text, logprobs=logprobs)

    def _observe(self, drafter: Drafter, committed: list[tuple[Window, Drawn]]) -> Guarded[None]:
        """Tell the drafter what became of its drafts, and give back the KV of those refused."""

        def observe() -> None:
            for window, drawn in told:
                drafter.observe(window.sequence.sequence_id, drawn.num_accepted, tuple(drawn.token_ids))

        if drafted := [window.sequence for window, _ in committed if window.drafts]:
            yield from self.memory.trim(drafted)
        told = [one for one in committed if one[0].sequence.status is Status.RUNNING]
        yield from self.attempting("drafter", [window.sequence for window, _ in told], observe)

    def forget_drafts(self, sequence: Sequence) -> None:
        if (drafter := self.parts.drafter) is not None:
            self.attempt("drafter", [], partial(drafter.release, sequence.sequence_id))

    def end_all(self, reason: FinishReason, **details: Any) -> None:
        for request_id in list(self.roster.requests):
            self._end(request_id, reason, **details)

    def _end(self, request_id: str, reason: FinishReason, **details: Any) -> None:
        """All lanes of a request at once; nothing when it is over."""
        if (lanes := self.roster.requests.get(request_id)) is not None:
            self.finish(lanes.live[0], reason, **details)

    def finish(self, sequence: Sequence, reason: FinishReason, **details: Any) -> None:
        """The end of a lane, or of all of them unless it is a stop or the length. The last one ends the request.

        Seat, KV and plugin state go back first; a request has one terminal event.
        """
        if sequence.status is Status.FINISHED:
            return
        if reason not in ("stop", "length"):
            shared = {name: value for name, value in details.items() if name == "error"}
            for other in [one for one in self.roster.requests[sequence.request.request_id].live if one is not sequence]:
                if other.walk is None:
                    self._finish_lane(other, reason, **shared)
                else:  # its lanes are nothing that the caller knows of
                    self.close_lane(other)
        self._finish_lane(sequence, reason, **details)

    def _finish_lane(self, sequence: Sequence, reason: FinishReason, **details: Any) -> None:
        if sequence.holds_kv and reason != "error":
            self.memory.publish([sequence], last=True)
        if sequence.status is Status.FINISHED:  # publishing failed, which ended it
            return
        lanes = self.roster.requests[sequence.request.request_id]
        stream = self._streams.get(sequence.sequence_id)
        self.close_lane(sequence)
        if stream is not None and not isinstance(details.get("stop"), str):
            details["text"] = details.get("text", "") + stream.finish()
        if not lanes.live:
            details |= {"finish_reason": reason, "metrics": metrics_of(lanes.ended, self.now())}
        name, lane = sequence.request.request_id, sequence.lane
        self._events.append(Event(request_id=name, lane=lane, lane_finish_reason=reason, **details))

    def close_lane(self, sequence: Sequence) -> None:
        """Take a sequence out and everything it holds back, without a word to the caller."""
        self.roster.end(sequence)
        self.memory.give_back(sequence)
        self.forget_drafts(sequence)
        self._streams.pop(sequence.sequence_id, None)

    def emit(self, event: Event) -> None:
        self._events.append(event)
