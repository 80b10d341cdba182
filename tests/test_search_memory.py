"""The outputs of a beam search depend on no KV manager, chunk, seat, preemption or batch mate, and lanes share blocks.

Expected outputs are those of transformers in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from beam_cases import beam_params, expected_beams, found_beams
from differential_cases import FORCED, FORCED_SOURCE
from engine_cases import fake_config, ids, real_config, require_idle, write_plugin
from step_cases import Steps

from pluglm import Engine, SamplingParams
from pluglm.assembly.registry import list_entries

PROMPT = [9, 4, 7, 2, 3, 5, 8, 1, 6, 2, 2, 9, 11]
OTHER = [1, 2, 3]
WIDTH, MAX_TOKENS = 6, 9
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONGEST = len(PROMPT) + MAX_TOKENS

ROOMY: dict[str, dict[str, Any]] = {
    "paged_1": {"kv": {"use": "paged", "block_size": 1}},
    "paged_16": {"kv": {"use": "paged", "block_size": 16}},
    "contiguous": {"kv": "contiguous"},
    "hash_prefix": {"kv": {"use": "hash_prefix", "block_size": 4}},
    "radix": {"kv": {"use": "radix", "block_size": 4}},
    "chunks_1": {"engine": {"max_step_tokens": 1}},
    "chunks_7": {"engine": {"max_step_tokens": 7}},
    "one_seat": {"engine": {"max_num_seqs": 1}},
    "three_seats": {"engine": {"max_num_seqs": 3}, "kv": {"use": "paged", "block_size": 4}},
    "drafter": {"drafter": {"use": "ngram", "num_tokens": 3}},
}
TIGHT: dict[str, dict[str, Any]] = {
    "paged_1": {"kv": {"use": "paged", "block_size": 1, "num_blocks": LONGEST}},
    "paged_4": {"kv": {"use": "paged", "block_size": 4, "num_blocks": 6}, "engine": {"max_num_seqs": 2}},
    "one_region": {"kv": {"use": "contiguous", "num_regions": 1, "region_tokens": LONGEST}},
    "three_regions": {"kv": {"use": "contiguous", "num_regions": 3, "region_tokens": LONGEST}},
    "hash_prefix": {"kv": {"use": "hash_prefix", "block_size": 4, "num_blocks": 7}},
    "radix": {"kv": {"use": "radix", "block_size": 4, "num_blocks": 7}, "engine": {"max_step_tokens": 5}},
    "host_tier": {"kv": {"use": "hash_prefix", "block_size": 4, "num_blocks": 8}, "kv_tiers": ["host"]},
    "preempt": {"kv": {"use": "paged", "block_size": 3, "num_blocks": 8}, "engine": {"when_kv_full": "preempt"}},
}
SCHEDULERS = sorted({one.name for kind in ("scheduling_policy", "scheduler") for one in list_entries(kind)})


@pytest.fixture(scope="module")
def model(make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model("searched", seed=4, vocab_size=30, initializer_range=0.15)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[list[int]]]:
    """Of PROMPT searched, OTHER greedy, and PROMPT searched again."""
    beams = expected_beams(model, PROMPT, WIDTH, MAX_TOKENS)
    return [beams, expected_beams(model, OTHER, 1, 12, eos=()), beams]


def run(engine: Engine) -> tuple[list[list[list[int]]], int]:
    """The outputs of those three at once, and how often somebody lost a seat or KV."""
    searched = beam_params(WIDTH, WIDTH, MAX_TOKENS)
    outputs = engine.generate([ids(*PROMPT), ids(*OTHER), ids(*PROMPT)], [searched, GREEDY, searched])
    require_idle(engine)
    return [found_beams(one) for one in outputs], sum(one.metrics.num_preemptions for one in outputs if one.metrics)


@pytest.mark.parametrize("name", ROOMY)
def test_with_room_for_all(model: Path, expected: Any, name: str) -> None:
    with Engine.from_config(real_config(model, search="beam", **ROOMY[name])) as engine:
        assert run(engine) == (expected, 0)


@pytest.mark.parametrize("name", TIGHT)
def test_with_room_for_few_lanes(model: Path, expected: Any, name: str) -> None:
    """Lanes that have their logits and wait for the others lose their KV to those, and are computed again."""
    with Engine.from_config(real_config(model, search="beam", **TIGHT[name])) as engine:
        outputs, num_preemptions = run(engine)
    assert outputs == expected
    assert num_preemptions > 0


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_in_a_tight_pool(model: Path, expected: Any, scheduler: str) -> None:
    kv = {"use": "paged", "block_size": 4, "num_blocks": 6}
    engine_keys = {"max_num_seqs": 2, "max_step_tokens": 7}
    with Engine.from_config(
        real_config(model, search="beam", kv=kv, scheduler=scheduler, engine=engine_keys)
    ) as engine:
        assert run(engine)[0] == expected


@pytest.mark.parametrize("kv", ["paged", "hash_prefix", "radix"])
def test_somebody_is_preempted_in_every_step(model: Path, expected: Any, tmp_path: Path, kv: str) -> None:
    """In all three ways: recompute, offload to the host, pause."""
    write_plugin(tmp_path, FORCED_SOURCE, FORCED)
    slots = {"kv": {"use": kv, "block_size": 4, "num_blocks": 30}, "engine": {"max_step_tokens": 5}}
    config = real_config(model, tmp_path, search="beam", scheduler=f"{FORCED}:ForcedPreemption", **slots)
    with Engine.from_config(config) as engine:
        outputs, num_preemptions = run(engine)
    assert outputs == expected
    assert num_preemptions > 0


@pytest.mark.parametrize("kv", ["paged", "hash_prefix", "radix"])
def test_lanes_share_the_blocks_that_they_have_in_common(tiny_model: Path, kv: str) -> None:
    """Of eight lanes of up to 75 tokens in blocks of 4, which are 19 blocks each, the 16 of the prompt exist once.

    Beyond them a lane has its own copy of the prompt's last, partly filled block at most, and blocks of its own.
    """
    prompt, width, max_tokens = list(range(1, 66)), 8, 10
    own = -(-(len(prompt) % 4 + max_tokens) // 4)
    config = fake_config(tiny_model, search="beam", kv={"use": kv, "block_size": 4, "num_blocks": 400})
    with Engine.from_config(config) as engine:
        steps, most = Steps(engine), 0
        steps.add("a", prompt, beam_params(width, width, max_tokens))
        while steps.core.is_live("a"):
            steps.step()
            most = max(most, steps.held)
        assert len(steps.lane_ends("a")) == width
        require_idle(engine)
    assert most <= len(prompt) // 4 + width * own
    assert most < width * -(-(len(prompt) + max_tokens) // 4) / 3


def test_lanes_that_were_dropped_leave_only_their_counts(tiny_model: Path) -> None:
    """Else a request would keep the logits and tokens of every lane that it ever had."""
    with Engine.from_config(fake_config(tiny_model, search="beam")) as engine:
        steps = Steps(engine)
        steps.add("a", PROMPT, beam_params(8, max_tokens=50, ignore_eos=True))
        ended = steps.core.roster.requests["a"].ended
        steps.until(lambda: len(ended) > 10)
        assert steps.core.is_live("a")
        assert not [one for one in ended if one.parked is not None or one.token_ids or one.output_token_ids]
