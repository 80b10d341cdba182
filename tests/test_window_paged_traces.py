"""Random arrivals, forks, cancellations and preemptions in window pools that are mostly full, on the fake backend.

Its logits are a hash of all that a layer of each window sees, so a wrong, stale or foreign token changes the output.
The reference is the paged manager with room for everything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, require_idle
from window_cases import KINDS, Rows, write_model

from pluglm import Engine, SamplingParams

POLICIES = ("fcfs", "priority", "fair", "mlfq", "shortest_first", "static_batch")
MAX_MODEL_LEN = 320
SHAPES = ((1, 7), (8, 40), (16, 24), (64, 64))  # block size and tokens of a step, by trace


@dataclass(frozen=True)
class Arrival:
    """A request that comes in a step, and the step in which it is cancelled, if it is."""

    name: str
    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    tenant: str
    cancelled: int | None


def trace(seed: int) -> list[Arrival]:
    draw = random.Random(seed)
    arrivals = []
    for number in range(14):
        length = draw.choice((draw.randint(1, 40), draw.randint(30, 120), draw.randint(120, 280)))
        params = SamplingParams(
            temperature=0.8,
            top_k=20,
            seed=number,
            max_tokens=draw.randint(1, 40),
            n=draw.choice((1, 1, 2)),
            ignore_eos=True,
        )
        arrivals.append(
            Arrival(
                name=f"{seed}-{number}",
                step=draw.randint(0, 30),
                prompt=tuple(draw.randrange(1, 300) for _ in range(length)),
                params=params,
                priority=draw.randint(0, 2),
                tenant=draw.choice("ab"),
                cancelled=draw.choice((None, None, None, draw.randint(5, 80))),
            )
        )
    return arrivals


def play(engine: Engine, arrivals: list[Arrival]) -> tuple[Rows, dict[str, str | None], int]:
    """Logits rows, the end of each request, and how often somebody was preempted."""
    core, rows, ends, preemptions = engine._core, Rows(engine), dict[str, str | None](), 0
    for step in range(4000):
        for one in arrivals:
            if one.step == step:
                core.add(one.name, one.prompt, one.params, priority=one.priority, tenant=one.tenant)
            if one.cancelled is not None and max(one.cancelled, one.step) == step:
                core.cancel(one.name)
        for event in core.step():
            if event.finish_reason is not None:
                ends[event.request_id] = event.error or event.finish_reason
                preemptions += event.metrics.num_preemptions if event.metrics else 0
        core.kv.audit()
        if step > 80 and len(ends) == len(arrivals):
            require_idle(engine)
            return rows, ends, preemptions
    raise AssertionError(f"after 4000 steps {len(ends)} of {len(arrivals)} requests have ended")


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_model(tmp_path_factory.mktemp(family), family, tiny_model) for family in KINDS}


def config_of(model: Path, kv: dict[str, Any], policy: str, chunk: int, seats: int) -> Any:
    return fake_config(
        model,
        model={"path": str(model), "dtype": "float32", "max_model_len": MAX_MODEL_LEN},
        kv=kv,
        scheduler=policy,
        engine={"max_step_tokens": chunk, "max_num_seqs": seats},
    )


@pytest.fixture(scope="module")
def with_room(models: dict[str, Path]) -> dict[tuple[str, int], Rows]:
    """Of each family and trace: the rows of all requests that are not cancelled."""
    known: dict[tuple[str, int], Rows] = {}
    for family in KINDS:
        for seed in range(len(SHAPES)):
            arrivals = [one for one in trace(seed) if one.cancelled is None]
            with Engine.from_config(config_of(models[family], {"use": "paged"}, "fcfs", 4096, 28)) as engine:
                known[family, seed] = play(engine, arrivals)[0]
    return known


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_row_is_that_of_a_run_with_room_for_all(
    models: dict[str, Path], with_room: dict[tuple[str, int], Rows], policy: str, family: str
) -> None:
    total = 0
    for seed, (block_size, chunk) in enumerate(SHAPES):
        arrivals = trace(seed)
        uncancelled = [one for one in arrivals if one.cancelled is None]
        kv = {
            "use": "window_paged",
            "block_size": block_size,
            "num_blocks": MAX_MODEL_LEN // block_size + 2,
            "num_windows": 1,
        }
        with Engine.from_config(config_of(models[family], kv, policy, chunk, 5)) as engine:
            rows, ends, preemptions = play(engine, arrivals)
        assert {ends[one.name] for one in uncancelled} == {"length"}
        assert rows.differing(with_room[family, seed]) == []
        total += preemptions
    assert total > 0 or policy == "static_batch"
