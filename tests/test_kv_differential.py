"""No token depends on chunk size, block size, prefix cache, preemption or batch mates: against one request at a time.

The reference is computed once, with one request after another in an engine without cache. Prompts share prefixes, so
that they are found in the caches; a scheduler of the test takes somebody's seat in every step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from differential_cases import Case, engine_config, mixed_requests, run_together, tokens_of
from engine_cases import require_idle

from pluglm import Engine

CHUNKS = {1: 1, 7: 7, 64: 64, "all": 4096}  # tokens that a step computes; a batch of 16 has less than 4096
BLOCK_SIZES = (1, 16, 64)
KV_MANAGERS = ("paged", "hash_prefix", "radix")
GROUPS = (1, 1, 1, 1, 4, 4, 16)  # requests at once: 0, 3 and 15 batch mates
CASES = mixed_requests(sum(GROUPS))


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of every case: tokens and ends of its lanes when nothing else is there, and nothing was before."""
    folder = tmp_path_factory.mktemp("alone")
    with Engine.from_config(engine_config(tiny_model, folder, chunk=4096, block_size=16)) as engine:
        return [tokens_of(run_together(engine, [case])[0]) for case in CASES]


def differing(engine: Engine, alone: list[Any]) -> tuple[list[int], Counter[str]]:
    """Numbers of the cases whose tokens differ, and what happened on the way."""
    wrong: list[int] = []
    counts: Counter[str] = Counter()
    numbers = iter(range(len(CASES)))
    for size in GROUPS:
        group = list(itertools.islice(numbers, size))
        for number, output in zip(group, run_together(engine, [CASES[one] for one in group]), strict=True):
            wrong += [number] if tokens_of(output) != alone[number] else []
            assert output.metrics is not None
            counts["requests"] += 1
            counts["cached"] += output.metrics.num_cached_tokens
            counts["recomputed"] += output.metrics.num_recomputed_tokens
            counts["preemptions"] += output.metrics.num_preemptions
    return wrong, counts


@pytest.mark.parametrize("preemption", ["never", "every step"])
@pytest.mark.parametrize("kv", KV_MANAGERS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_tokens_are_those_of_a_request_alone(
    tiny_model: Path, tmp_path: Path, alone: list[Any], chunk: Any, block_size: int, kv: str, preemption: str
) -> None:
    forced = preemption != "never"
    config = engine_config(tiny_model, tmp_path, chunk=CHUNKS[chunk], block_size=block_size, kv=kv, forced=forced)
    with Engine.from_config(config) as engine:
        wrong, counts = differing(engine, alone)
        scheduler: Any = engine._core.parts.scheduler
        require_idle(engine)
    assert wrong == []
    assert (counts["cached"] > 0) == (kv != "paged")
    if forced:
        assert min(scheduler.counts.values()) > 0
        assert counts["preemptions"] >= sum(scheduler.counts.values())
        assert counts["recomputed"] > 0 or kv != "paged"  # a cache may give all of it back
    else:
        assert counts["preemptions"] == 0


def test_the_sweep_is_of_two_thousand_requests() -> None:
    """And of every kind: greedy and seeded, one output and two, prompts that share more than a block of 64."""
    num_runs = len(CHUNKS) * len(BLOCK_SIZES) * len(KV_MANAGERS) * 2
    assert num_runs * sum(GROUPS) >= 2000
    assert set(GROUPS) == {1, 4, 16}
    kinds = {(case.params.greedy, case.params.n) for case in CASES}
    assert kinds == {(True, 1), (True, 2), (False, 1), (False, 2)}
    assert _num_sharing(CASES, 64) > 1


def _num_sharing(cases: list[Case], num_tokens: int) -> int:
    """Cases that begin with the most frequent first num_tokens tokens."""
    starts = Counter(case.prompt[:num_tokens] for case in cases if len(case.prompt) > num_tokens)
    return max(starts.values())
