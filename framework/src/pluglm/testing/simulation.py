"""A small world for schedulers: sequences, seats, KV blocks and steps, without a model. Applies plans, judges none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pluglm.kernel.core import Budget, RequestView, StepPlan, StepView
from pluglm.kernel.interfaces.kv import KVTransaction
from pluglm.testing.block_kv import BlockPool

BLOCK_SIZE = 4


class Planner(Protocol):
    """What the world needs of a scheduler."""

    def plan(self, view: StepView, budget: Budget, kv: KVTransaction) -> StepPlan: ...


@dataclass(slots=True, kw_only=True)
class Job:
    """One request's life: it arrives at a step, has a prompt and wants max_new tokens."""

    sequence_id: int
    arrival: int
    num_prompt: int
    max_new: int
    priority: int = 0
    num_known: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    running: bool = False
    finished: bool = False

    def __post_init__(self) -> None:
        self.num_known = self.num_known or self.num_prompt

    def view(self) -> RequestView:
        return RequestView(
            sequence_id=self.sequence_id,
            request_id=f"r{self.sequence_id}",
            tenant=f"t{self.sequence_id % 2}",
            priority=self.priority,
            arrival_s=self.arrival * 0.01,
            num_prompt=self.num_prompt,
            num_known=self.num_known,
            num_computed=self.num_computed,
            num_drafts=0,
            num_output=self.num_known - self.num_prompt,
            max_new_tokens=self.max_new,
            num_preemptions=self.num_preemptions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One planned step. before, after: block tables by sequence id when it was planned and after its commit."""

    view: StepView
    plan: StepPlan
    before: dict[int, tuple[int, ...]]
    after: dict[int, tuple[int, ...]]

    @property
    def views(self) -> dict[int, RequestView]:
        return {one.sequence_id: one for one in (*self.view.running, *self.view.waiting)}


@dataclass(slots=True, kw_only=True)
class World:
    """Jobs over a pool of blocks. A step's plan is applied as far as it makes sense, whatever it breaks."""

    jobs: list[Job]
    pool: BlockPool
    budget: Budget
    now: int = 0
    order: list[int] = field(default_factory=list)  # running sequence ids in admission order

    def view(self) -> StepView:
        jobs = {job.sequence_id: job for job in self.jobs}
        waiting = [one for one in self.jobs if not one.running and not one.finished and one.arrival <= self.now]
        waiting.sort(key=lambda job: (job.arrival, job.sequence_id))
        return StepView(
            step=self.now,
            now_s=self.now * 0.01,
            budget=self.budget,
            running=tuple(jobs[one].view() for one in self.order),
            waiting=tuple(job.view() for job in waiting),
        )

    @property
    def unfinished(self) -> list[int]:
        return [job.sequence_id for job in self.jobs if not job.finished]

    def step(self, planner: Planner) -> Turn:
        view, before = self.view(), self.tables()
        transaction = self.pool.transaction()
        plan = planner.plan(view, self.budget, transaction)
        transaction.commit()
        turn = Turn(view=view, plan=plan, before=before, after=self.tables())
        self._apply(plan)
        self.now += 1
        return turn

    def tables(self) -> dict[int, tuple[int, ...]]:
        return {one: tuple(table) for one, table in self.pool.book.tables.items()}

    def _apply(self, plan: StepPlan) -> None:
        jobs = {job.sequence_id: job for job in self.jobs}
        for one in plan.preempted:
            if one in self.order:
                self.order.remove(one)
                jobs[one].running, jobs[one].num_computed = False, 0
                jobs[one].num_preemptions += 1
        for item in plan.items:
            job = jobs.get(item.sequence_id)
            if job is not None and not job.finished:
                self._advance(job, item.num_tokens)

    def _advance(self, job: Job, num_tokens: int) -> None:
        if not job.running:
            job.running = True
            self.order.append(job.sequence_id)
        job.num_computed = min(job.num_known, job.num_computed + max(num_tokens, 0))
        if job.num_computed < job.num_known:
            return
        job.num_known += 1
        if job.num_known - job.num_prompt >= job.max_new:
            job.finished, job.running = True, False
            self.order.remove(job.sequence_id)
            self.pool.book.tables.pop(job.sequence_id, None)
            self.pool.book.sizes.pop(job.sequence_id, None)


def world(jobs: list[Job], *, num_blocks: int = 64, num_tokens: int = 24, num_seats: int = 4) -> World:
    """A world with room for everything unless told otherwise."""
    return World(
        jobs=jobs, pool=BlockPool(num_blocks, BLOCK_SIZE), budget=Budget(num_tokens=num_tokens, num_seats=num_seats)
    )


def busy_world(seed: int, *, num_blocks: int = 16) -> World:
    """Twelve jobs of all sizes over few blocks and seats: chunks, queues and preemptions all happen."""
    generator = random.Random(seed)
    jobs = [
        Job(
            sequence_id=10 + index,
            arrival=generator.randint(0, 12),
            num_prompt=generator.randint(1, 30),
            max_new=generator.randint(1, 20),
            priority=generator.randint(0, 2),
        )
        for index in range(12)
    ]
    return world(jobs, num_blocks=num_blocks, num_tokens=12, num_seats=3)


def play(place: World, planner: Planner, judge: Callable[[Turn], None], max_steps: int = 400) -> None:
    """Steps until every job is finished, each turn judged; stops in silence after max_steps."""
    while place.unfinished and place.now < max_steps:
        judge(place.step(planner))
