"""A small world for schedulers: sequences, seats, KV blocks and steps, without a model. Applies plans, judges none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pluglm.kernel.core import Budget, CacheKey, Event, FinishReason, RequestView, StepPlan, StepView
from pluglm.kernel.interfaces.kv import KVTransaction
from pluglm.testing.block_kv import BlockPool, BlockTransaction

BLOCK_SIZE = 4
STEP_S = 0.01


class Planner(Protocol):
    """What the world needs of a scheduler."""

    def plan(self, view: StepView, budget: Budget, kv: KVTransaction) -> StepPlan: ...


@dataclass(slots=True, kw_only=True)
class Job:
    """The life of one sequence: it arrives at a step, has a prompt and wants max_new tokens.

    num_lanes: outputs of its request; the others are forked once the prompt is computed, and wait with its KV.
    deadline: the step by which it is due; the world ends nobody for it. num_cached: tokens of its prompt that a pool
    with a cache lets it adopt. request_id: "r" and the sequence id unless given.
    """

    sequence_id: int
    arrival: int
    num_prompt: int
    max_new: int
    priority: int = 0
    num_lanes: int = 1
    deadline: int | None = None
    num_cached: int = 0
    tenant: str = ""
    request_id: str = ""
    lane: int = 0
    num_known: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    running: bool = False
    holds_kv: bool = False
    finished: bool = False

    def __post_init__(self) -> None:
        self.num_known = self.num_known or self.num_prompt
        self.tenant = self.tenant or f"t{self.sequence_id % 2}"
        self.request_id = self.request_id or f"r{self.sequence_id}"

    def view(self) -> RequestView:
        adopts = self.num_cached and not (self.running or self.holds_kv or self.num_computed)
        key = CacheKey(namespace=b"", token_ids=range(self.num_known), limit=self.num_known - 1) if adopts else None
        return RequestView(
            sequence_id=self.sequence_id,
            request_id=self.request_id,
            tenant=self.tenant,
            priority=self.priority,
            arrival_s=self.arrival * STEP_S,
            num_prompt=self.num_prompt,
            num_known=self.num_known,
            num_computed=self.num_computed,
            num_drafts=0,
            num_output=self.num_known - self.num_prompt,
            max_new_tokens=self.max_new,
            num_preemptions=self.num_preemptions,
            lane=self.lane,
            deadline_s=None if self.deadline is None else self.deadline * STEP_S,
            holds_kv=self.running or self.holds_kv,
            cache_key=key,
            probe=self._probe,
        )

    def _probe(self, key: CacheKey) -> int:
        return min(self.num_cached, key.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One planned step. before, after: block tables by sequence id when it was planned and after its commit.

    adopted: what each `acquire` of the step returned. events: those of the step, as an engine would tell them.
    """

    view: StepView
    plan: StepPlan
    before: dict[int, tuple[int, ...]]
    after: dict[int, tuple[int, ...]]
    adopted: dict[int, int]
    events: tuple[Event, ...]

    @property
    def views(self) -> dict[int, RequestView]:
        return {one.sequence_id: one for one in (*self.view.running, *self.view.waiting)}


class CachingTransaction(BlockTransaction):
    """Gives whoever comes with a key the tokens that its job has cached, in blocks of its own, if there is room."""

    def __init__(self, manager: BlockPool) -> None:
        super().__init__(manager)
        self.cached: dict[int, int] = {}
        self.adopted: dict[int, int] = {}

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        super().acquire(sequence_id, key)
        num_cached = 0 if key is None else min(self.cached[sequence_id], key.limit)
        if num_cached <= self.manager.block_size * self.free_blocks():
            self.extend(sequence_id, num_cached)
            self.adopted[sequence_id] = num_cached
        return self.adopted.get(sequence_id, 0)

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self.adopted.pop(sequence_id, None)


@dataclass(slots=True, kw_only=True)
class World:
    """Jobs over a pool of blocks. A step's plan is applied as far as it makes sense, whatever it breaks."""

    jobs: list[Job]
    pool: BlockPool
    budget: Budget
    now: int = 0
    order: list[int] = field(default_factory=list)  # running sequence ids in admission order
    events: list[Event] = field(default_factory=list)  # of the step in progress

    def view(self) -> StepView:
        jobs = {job.sequence_id: job for job in self.jobs}
        waiting = [one for one in self.jobs if not one.running and not one.finished and one.arrival <= self.now]
        waiting.sort(key=lambda job: (job.arrival, job.sequence_id))
        return StepView(
            step=self.now,
            now_s=self.now * STEP_S,
            budget=self.budget,
            running=tuple(jobs[one].view() for one in self.order),
            waiting=tuple(job.view() for job in waiting),
        )

    @property
    def unfinished(self) -> list[int]:
        return [job.sequence_id for job in self.jobs if not job.finished]

    def step(self, planner: Planner) -> Turn:
        view, before = self.view(), self.tables()
        transaction = self.transaction()
        plan = planner.plan(view, self.budget, transaction)
        transaction.commit()
        after, self.events = self.tables(), []
        self._apply(plan, transaction.adopted)
        self.now += 1
        return Turn(
            view=view, plan=plan, before=before, after=after, adopted=transaction.adopted, events=tuple(self.events)
        )

    def transaction(self) -> CachingTransaction:
        transaction = CachingTransaction(self.pool)
        transaction.cached = {job.sequence_id: job.num_cached for job in self.jobs}
        return transaction

    def tables(self) -> dict[int, tuple[int, ...]]:
        return {one: tuple(table) for one, table in self.pool.book.tables.items()}

    def _apply(self, plan: StepPlan, adopted: dict[int, int]) -> None:
        jobs = {job.sequence_id: job for job in self.jobs}
        for one, _ in plan.refused:
            if one in jobs:
                self._finish(jobs[one], "refused")
        for one in (*plan.preempted, *plan.offloaded, *plan.paused):
            job = jobs.get(one)
            if job is not None and (job.running or job.holds_kv):
                self._leave(job, keeps_kv=one in plan.paused, keeps_work=one not in plan.preempted)
        for item in plan.items:
            job = jobs.get(item.sequence_id)
            if job is not None and not job.finished:
                self._advance(job, item.num_tokens, adopted.get(item.sequence_id, 0))

    def _leave(self, job: Job, *, keeps_kv: bool, keeps_work: bool) -> None:
        if job.running:
            self.order.remove(job.sequence_id)
        job.running, job.holds_kv = False, keeps_kv
        job.num_computed = job.num_computed if keeps_work else 0
        job.num_preemptions += 1

    def _advance(self, job: Job, num_tokens: int, num_adopted: int) -> None:
        if not job.running:
            job.running = True
            self.order.append(job.sequence_id)
        job.num_computed = min(job.num_known, max(job.num_computed, num_adopted) + max(num_tokens, 0))
        if job.num_computed < job.num_known:
            return
        self._fork(job)
        job.num_known += 1
        if job.num_known - job.num_prompt >= job.max_new:
            self._finish(job, "length", token_ids=(1,))
        else:
            self.events.append(Event(request_id=job.request_id, lane=job.lane, token_ids=(1,)))

    def _fork(self, job: Job) -> None:
        """The other lanes share all of the prompt but its last token, whose logits each of them needs."""
        book, num_shared = self.pool.book, job.num_prompt - 1
        for lane in range(1, job.num_lanes if job.num_known == job.num_prompt and not job.lane else 1):
            child = Job(
                sequence_id=max(one.sequence_id for one in self.jobs) + 1,
                arrival=job.arrival,
                num_prompt=job.num_prompt,
                max_new=job.max_new,
                priority=job.priority,
                deadline=job.deadline,
                tenant=job.tenant,
                request_id=job.request_id,
                lane=lane,
                num_computed=num_shared,
                holds_kv=True,
            )
            self.jobs.append(child)
            book.tables[child.sequence_id] = book.tables[job.sequence_id][: -(-num_shared // BLOCK_SIZE)]
            book.sizes[child.sequence_id] = num_shared
        job.num_lanes = 1

    def _finish(self, job: Job, reason: FinishReason, token_ids: tuple[int, ...] = ()) -> None:
        """The request ends with the last of its lanes."""
        if job.running:
            self.order.remove(job.sequence_id)
        job.finished, job.running, job.holds_kv = True, False, False
        self.pool.book.tables.pop(job.sequence_id, None)
        self.pool.book.sizes.pop(job.sequence_id, None)
        is_last = all(one.finished for one in self.jobs if one.request_id == job.request_id)
        self.events.append(
            Event(
                request_id=job.request_id,
                lane=job.lane,
                token_ids=token_ids,
                lane_finish_reason=reason,
                finish_reason=reason if is_last else None,
            )
        )


def world(jobs: list[Job], *, num_blocks: int = 64, num_tokens: int = 24, num_seats: int = 4) -> World:
    """A world with room for everything unless told otherwise."""
    return World(
        jobs=jobs, pool=BlockPool(num_blocks, BLOCK_SIZE), budget=Budget(num_tokens=num_tokens, num_seats=num_seats)
    )


def busy_world(seed: int, *, num_blocks: int = 16) -> World:
    """Twelve jobs of all sizes over few blocks and seats: chunks, queues and preemptions all happen."""
    generator, dates = random.Random(seed), random.Random(f"due {seed}")
    jobs = [
        Job(
            sequence_id=10 + index,
            arrival=generator.randint(0, 12),
            num_prompt=generator.randint(1, 30),
            max_new=generator.randint(1, 20),
            priority=generator.randint(0, 2),
            deadline=dates.choice([None, dates.randint(20, 400)]),
        )
        for index in range(12)
    ]
    return world(jobs, num_blocks=num_blocks, num_tokens=12, num_seats=3)


def play(place: World, planner: Planner, judge: Callable[[Turn], None], max_steps: int = 400) -> None:
    """Steps until every job is finished, each turn judged; stops in silence after max_steps."""
    while place.unfinished and place.now < max_steps:
        judge(place.step(planner))
