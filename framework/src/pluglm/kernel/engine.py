"""The engine loop: plan, execute, sample, commit. It owns every sequence's state; plugins return values."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from pluglm.kernel import admission, drafting
from pluglm.kernel.core import (
    BlockCopies,
    Chunk,
    Event,
    FinishReason,
    PlanItem,
    Request,
    Sequence,
    Status,
    StepPlan,
    StepView,
)
from pluglm.kernel.drawing import Drawer, Drawn, Window, follow
from pluglm.kernel.ending import ending, metrics_of
from pluglm.kernel.errors import ComponentFailure, RequestError
from pluglm.kernel.guard import Watched
from pluglm.kernel.interfaces.drafter import Drafter
from pluglm.kernel.interfaces.kv import KVManager, KVTransaction
from pluglm.kernel.interfaces.services import TextStream
from pluglm.kernel.parts import Parts
from pluglm.kernel.planner import refuse_bad_items
from pluglm.kernel.sampling_params import SamplingParams

logger = logging.getLogger("pluglm")
ResultT = TypeVar("ResultT")
MAX_IDLE_STEPS = 100  # empty plans in a row, with work waiting, before the scheduler is called stuck


@dataclass(slots=True)
class _Step:
    """What one step works on: the planned sequences, each with its token count, and the block copies to do first."""

    items: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: BlockCopies = ()

    @property
    def windows(self) -> list[Window]:
        """Those that reach the end of what is known, with the drafts that were computed along."""
        return [
            Window(sequence, tuple(sequence.drafts[: sequence.drafts_within(count)]))
            for sequence, count in self.items
            if sequence.drafts_within(count) >= 0
        ]


class EngineCore:
    """Drives requests to their one terminal event. Not thread-safe: callers take turns."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.kv: KVManager = parts.runner.kv
        self._drawer = Drawer(parts.sampler, self._attempt, parts.names, parts.tokenizer.vocab_size)
        self._running: dict[int, Sequence] = {}
        self._waiting: dict[int, Sequence] = {}
        self._by_request: dict[str, Sequence] = {}
        self._streams: dict[int, TextStream] = {}
        self._held_back: list[int] = []  # sequences whose KV an abandoned call may still write to
        self._events: list[Event] = []
        self._next_id = self._step_index = self._idle_steps = 0

    def now(self) -> float:
        return self.parts.runner.backend.now()

    def add(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        priority: int = 0,
        tenant: str = "",
    ) -> Request:
        """Queue a request. Raises RequestError (nothing queued) when it can never run or the policy refuses it."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            arrival_s=self.now(),
            max_new_tokens=0 if params.max_tokens is None else params.max_tokens,
            priority=priority,
            tenant=tenant,
        )
        sequence = admission.admit(request, self._next_id, self.parts, self._by_request, len(self._waiting))
        self._streams[self._next_id] = self.parts.text_stream(params)
        self._waiting[self._next_id] = self._by_request[request_id] = sequence
        self._next_id += 1
        self.parts.hooks.call("request_admitted", request=sequence.request)
        return sequence.request

    def cancel(self, request_id: str) -> bool:
        """End a request with `cancelled`; its event comes with the next step. False when it is not live."""
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self._finish(sequence, "cancelled")
        return sequence is not None

    def is_live(self, request_id: str) -> bool:
        return request_id in self._by_request

    def step(self) -> list[Event]:
        """Advance every request as the scheduler sees fit. Never raises for what a plugin does."""
        started = self.now()
        self._return_held_back()
        self._propose()
        step = self._plan()
        logits_RV = self._execute(step)
        drawn = self._sample(step, logits_RV)
        self._commit(step, drawn)
        num_tokens = sum(count for _, count in step.items)
        self.parts.hooks.call("step_done", step=self._step_index, seconds=self.now() - started, num_tokens=num_tokens)
        self._step_index += 1
        return self._deliver()

    def _deliver(self) -> list[Event]:
        """The step's events, shown to the policy and the hooks before the callers get them."""
        events, self._events = self._events, []
        if (policy := self.parts.policy) is not None and events:
            self._attempt("scheduler", (), lambda: list(map(policy.on_event, events)))
        for event in events:
            self.parts.hooks.call("event_emitted", event=event)
        return events

    def close(self) -> list[Event]:
        """Cancel what runs; returns its last events. Nothing may be called afterwards."""
        for sequence in list(self._by_request.values()):
            self._finish(sequence, "cancelled")
        events = self._deliver()
        self.parts.hooks.call("run_finished")
        self.parts.guard.close()
        return events

    def _attempt(
        self, slot: str, touched: Iterable[Sequence], call: Callable[[], ResultT], undo: Callable[[], Any] = tuple
    ) -> ResultT | None:
        """call() under the guard; when the component fails (None), so do the requests it touched, and nothing else."""
        try:
            return self.parts.guard.call(self.parts.names[slot], call)
        except (ComponentFailure, RequestError) as failure:
            said = failure if isinstance(failure, ComponentFailure) else f"{self.parts.names[slot]} raised {failure}"
            reason = " ".join(str(said).split())
            logger.warning("%s", reason)
            logger.debug("it was raised here:", exc_info=failure.__cause__ or failure)
            undo()
            for sequence in list(touched):
                self._finish(sequence, "error", error=reason)
            return None

    def _change_kv(self, slot: str, touched: Iterable[Sequence], change: Callable[[Any], ResultT]) -> ResultT | None:
        """change(transaction) as an _attempt; the transaction that it does not commit is rolled back."""
        opened: list[KVTransaction] = []

        def run() -> ResultT:
            opened.append(self.kv.transaction())
            return change(Watched(opened[0], self.parts.guard, self.parts.names["kv"]))

        def roll_back() -> None:
            for transaction in opened:
                with suppress(RuntimeError):  # an abandoned call may have closed it
                    transaction.rollback()

        return self._attempt(slot, touched, run, lambda: self._attempt("kv", (), roll_back))

    def _propose(self) -> None:
        """Ask the drafter about every sequence that has nothing but its newest token to compute."""
        drafter = self.parts.drafter
        asked = drafting.requests(self._running.values(), self.parts.budget) if drafter else []
        if drafter is None or not asked:
            return
        touched = [self._running[one.sequence_id] for one in asked]
        ask = partial(drafting.ask, drafter, asked, self.parts.num_ids)
        answers = self._attempt("drafter", touched, ask)
        for sequence, answer in zip(touched, answers or [], strict=False):
            if isinstance(answer, str):
                self._finish(sequence, "error", error=f"{self.parts.names['drafter']} {answer}")
            else:
                sequence.drafts = answer

    def _plan(self) -> _Step:
        """Ask the scheduler, validate its plan, and make the KV and the sequences agree with it."""
        live = [*self._running.values(), *self._waiting.values()]
        if not live:
            self._idle_steps = 0
            return _Step()
        view = self._view()

        def choose(kv: Any) -> tuple[StepPlan, list[str], BlockCopies, list[int]]:
            wanted = self.parts.scheduler.plan(view, view.budget, kv)
            plan, refused = refuse_bad_items(wanted, view, kv)
            return plan, refused, kv.commit(), [self._held_tokens(item.sequence_id) for item in plan.items]

        planned = self._change_kv("scheduler", live, choose)
        if planned is None:
            return _Step()
        plan, refused, copies, held = planned
        for reason in refused:
            logger.warning("%s: refused: %s", self.parts.names["scheduler"], reason)
        self.parts.hooks.call("step_planned", view=view, plan=plan)
        self._apply(plan)
        self._watch_progress(plan)
        return _Step([pair for pair in map(self._planned, plan.items, held) if pair is not None], copies)

    def _held_tokens(self, sequence_id: int) -> int:
        """Tokens that a sequence's committed KV has room for."""
        try:
            return len(self.kv.block_table(sequence_id)) * self.kv.layout.block_size
        except KeyError:
            return 0

    def _view(self) -> StepView:
        waiting = sorted(self._waiting.values(), key=lambda s: (s.request.arrival_s, s.sequence_id))
        return StepView(
            step=self._step_index,
            now_s=self.now(),
            budget=self.parts.budget,
            running=tuple(admission.view_of(s) for s in self._running.values()),
            waiting=tuple(admission.view_of(s) for s in waiting),
        )

    def _apply(self, plan: StepPlan) -> None:
        for sequence_id in plan.preempted:
            sequence = self._running.pop(sequence_id, None)
            if sequence is not None:
                sequence.status, sequence.num_computed, sequence.drafts = Status.WAITING, 0, []
                sequence.num_preemptions += 1
                self._waiting[sequence_id] = sequence
                self._forget_drafts(sequence)
        for item in plan.items:
            if (sequence := self._waiting.pop(item.sequence_id, None)) is not None:
                sequence.status = Status.RUNNING
                self._running[item.sequence_id] = sequence

    def _planned(self, item: PlanItem, held: int) -> tuple[Sequence, int] | None:
        """The live sequence of an item; one whose KV the scheduler did not extend fails by the scheduler's name."""
        sequence = self._running.get(item.sequence_id)
        if sequence is None:
            return None
        needed = sequence.num_computed + item.num_tokens
        if held >= needed:
            return sequence, item.num_tokens
        what = f"planned {needed} tokens of a sequence and extended its KV to {held}"
        self._finish(sequence, "error", error=f"{self.parts.names['scheduler']} {what}")
        return None

    def _watch_progress(self, plan: StepPlan) -> None:
        self._idle_steps = 0 if plan.items else self._idle_steps + 1
        if self._idle_steps and self._held_back:  # the KV that is missing may come back
            self.parts.guard.wait_settled(1 / MAX_IDLE_STEPS)
        if self._idle_steps >= MAX_IDLE_STEPS:
            why = "while an abandoned call holds KV" if self._held_back else "with work waiting"
            reason = f"{self.parts.names['scheduler']} planned nothing in {MAX_IDLE_STEPS} steps {why}"
            self._idle_steps = 0
            for sequence in list(self._by_request.values()):
                self._finish(sequence, "error", error=reason)

    def _execute(self, step: _Step) -> torch.Tensor | None:
        """Run the planned tokens; logits of every row from each sequence's last known token on."""
        if not step.items:
            return None
        num_rows = [max(0, sequence.drafts_within(count) + 1) for sequence, count in step.items]
        chunks = [Chunk(s.sequence_id, s.pending(count), s.num_computed, s.num_prompt) for s, count in step.items]

        def run() -> torch.Tensor:
            inputs = self.parts.runner.make_input(chunks, num_rows=num_rows, copies=step.copies)
            logits_RV = self.parts.runner.run(inputs)
            got = [*getattr(logits_RV, "shape", ()), getattr(logits_RV, "dtype", type(logits_RV).__name__)]
            asked = [sum(num_rows), self.parts.runner.spec.vocab_size, torch.float32]
            if got != asked:
                raise ComponentFailure(self.parts.names["step"], f"returned logits {got} where {asked} were asked")
            return logits_RV

        return self._attempt("backend", [sequence for sequence, _ in step.items], run)

    def _sample(self, step: _Step, logits_RV: torch.Tensor | None) -> list[Drawn]:
        windows = step.windows
        return [] if logits_RV is None or not windows else self._drawer.draw(logits_RV, windows)

    def _commit(self, step: _Step, drawn: list[Drawn]) -> None:
        """Accepted tokens become known, computed counts and KV follow, and whoever is done ends."""
        windows = step.windows if drawn else []
        for sequence, count in step.items:
            if sequence.status is Status.RUNNING:
                sequence.num_computed += min(count, len(sequence.token_ids) - sequence.num_computed)
        going_on: list[tuple[Sequence, Drawn]] = []
        for window, result in zip(windows, drawn, strict=True):
            sequence = window.sequence
            if result.error is not None:
                self._finish(sequence, "error", error=result.error)
            if sequence.status is not Status.RUNNING:
                continue
            sequence.num_computed += result.num_accepted
            sequence.num_drafted += len(window.drafts)
            sequence.drafts = []
            self._emit(sequence, result)
            if sequence.status is Status.RUNNING:
                going_on.append((sequence, result))
        if self.parts.drafter is not None and going_on:
            self._observe(self.parts.drafter, going_on)

    def _emit(self, sequence: Sequence, result: Drawn) -> None:
        """Append the drawn tokens one by one up to the first that ends the request, and tell the caller."""
        request, now = sequence.request, self.now()
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
            terminated = matcher is not None and self._attempt("grammar", [sequence], partial(follow, matcher, token))
            if terminated is None:
                return
            reason, stop = ending(sequence, token, delta.stopped, terminated, self.parts.eos_token_ids)
            if reason is not None:
                break
        sequence.first_token_s = now if sequence.first_token_s is None else sequence.first_token_s
        sequence.num_accepted += min(result.num_accepted, taken)
        tokens, logprobs = tuple(result.token_ids[:taken]), tuple(result.logprobs[:taken])
        if reason is None:
            self._events.append(Event(request_id=request.request_id, token_ids=tokens, text=text, logprobs=logprobs))
        else:
            self._finish(sequence, reason, stop=stop, token_ids=tokens, text=text, logprobs=logprobs)

    def _observe(self, drafter: Drafter, committed: list[tuple[Sequence, Drawn]]) -> None:
        """Tell the drafter what became of its drafts, and give back the KV of those refused."""
        touched = [sequence for sequence, _ in committed]

        def observe() -> None:
            for sequence, drawn in committed:
                drafter.observe(sequence.sequence_id, drawn.num_accepted, tuple(drawn.token_ids))

        def trim(kv: Any) -> None:
            for sequence in touched:
                kv.trim(sequence.sequence_id, sequence.num_computed)
            kv.commit()

        self._change_kv("kv", touched, trim)
        self._attempt("drafter", [one for one in touched if one.status is Status.RUNNING], observe)

    def _forget_drafts(self, sequence: Sequence) -> None:
        drafter = self.parts.drafter
        if drafter is not None:
            self._attempt("drafter", [], lambda: drafter.release(sequence.sequence_id))

    def _finish(self, sequence: Sequence, reason: FinishReason, **details: Any) -> None:
        """The one terminal event of a request; its seat, KV and plugin state go back first."""
        if sequence.status is Status.FINISHED:
            return
        sequence.status = Status.FINISHED
        self._running.pop(sequence.sequence_id, None)
        self._waiting.pop(sequence.sequence_id, None)
        del self._by_request[sequence.request.request_id]
        self._held_back.append(sequence.sequence_id)
        self._return_held_back()
        self._forget_drafts(sequence)
        stream = self._streams.pop(sequence.sequence_id)
        if not isinstance(details.get("stop"), str):
            details["text"] = details.get("text", "") + stream.finish()
        metrics = metrics_of(sequence, self.now())
        self._events.append(
            Event(request_id=sequence.request.request_id, finish_reason=reason, metrics=metrics, **details)
        )

    def _return_held_back(self) -> None:
        """Release the KV of ended sequences once no abandoned call can write to it any more."""
        if not self._held_back or not self.parts.guard.settled:
            return
        held, self._held_back = self._held_back, []

        def release(kv: Any) -> bool:
            for sequence_id in held:
                with suppress(ValueError):  # it was waiting and holds none
                    kv.release(sequence_id)
            kv.commit()
            return True

        if self._change_kv("kv", (), release) is None:
            self._held_back = held  # tried again with the next step
