"""Trees of drafts change no token: on the fake backend, whose tokens are a digest of all that the KV gives back.

The expected tokens come from the docstrings of the fake backend, so a stale, shifted or shared block shows at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from branch_cases import oracle, taken
from engine_cases import fake_config, fake_tokens, ids, require_idle

from pluglm import Engine, SamplingParams

VOCAB = 320  # of the tiny model and its tokenizer
LENGTH = 24
PROMPTS = [[9, 41, 77], [9, 41, 77, 12, 30, 5, 18, 33, 21], [60], list(range(100, 117))]
PARAMS = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
MANAGERS: dict[str, dict[str, Any]] = {
    "paged 4": {"use": "paged", "block_size": 4},
    "paged 1": {"use": "paged", "block_size": 1},
    "paged 16": {"use": "paged", "block_size": 16},
    "contiguous": {"use": "contiguous", "num_regions": 8},
    "hash_prefix": {"use": "hash_prefix", "block_size": 4},
    "radix": {"use": "radix", "block_size": 4},
    "window_paged": {"use": "window_paged", "block_size": 4},
}


def expected() -> list[list[int]]:
    return [fake_tokens(prompt, LENGTH, VOCAB) for prompt in PROMPTS]


def make(model: Path, **slots: Any) -> Engine:
    texts = [[*prompt, *output] for prompt, output in zip(PROMPTS, expected(), strict=True)]
    return Engine.from_config(fake_config(model, **{"drafter": oracle(texts), **slots}))


def require_expected(engine: Engine, num_rounds: int = 2) -> None:
    for _ in range(num_rounds):
        outputs = engine.generate([ids(*prompt) for prompt in PROMPTS], PARAMS)
        if [output.error for output in outputs] != [None] * len(PROMPTS):
            raise AssertionError([output.error for output in outputs])
        if [output.token_ids for output in outputs] != expected():
            raise AssertionError("other tokens than without branches")
    require_idle(engine)


@pytest.mark.parametrize("kv", MANAGERS)
def test_every_manager(tiny_model: Path, kv: str) -> None:
    with make(tiny_model, kv=MANAGERS[kv]) as engine:
        require_expected(engine)
        assert taken(engine) > 10


@pytest.mark.parametrize("kv", ["paged 4", "hash_prefix", "radix", "contiguous"])
@pytest.mark.parametrize("step_tokens", [5, 7, 12, 40])
def test_small_budgets_and_prompts_in_chunks(tiny_model: Path, kv: str, step_tokens: int) -> None:
    with make(tiny_model, kv=MANAGERS[kv], engine={"max_step_tokens": step_tokens}) as engine:
        runner: Any = engine._core.parts.runner
        run, sizes = runner.run, list[int]()
        runner.run = lambda inputs: sizes.append(len(inputs.token_ids_T)) or run(inputs)
        require_expected(engine)
        assert max(sizes) <= step_tokens
        assert step_tokens < 40 or taken(engine) > 0


@pytest.mark.parametrize("kv", ["paged", "hash_prefix", "radix"])
@pytest.mark.parametrize("num_blocks", [11, 14, 18, 24])
def test_little_kv_costs_branches_and_no_request(tiny_model: Path, kv: str, num_blocks: int) -> None:
    """The longest text alone needs eleven blocks; with fewer than for all, sequences preempt one another."""
    with make(tiny_model, kv={"use": kv, "block_size": 4, "num_blocks": num_blocks}) as engine:
        require_expected(engine)


def test_regions_that_are_all_held_leave_no_room_for_branches(tiny_model: Path) -> None:
    with make(tiny_model, kv={"use": "contiguous", "num_regions": len(PROMPTS)}) as engine:
        require_expected(engine, 1)
        before = taken(engine)
        engine.generate(ids(*PROMPTS[0]), PARAMS)
        assert taken(engine) > before


def test_no_request_is_preempted_for_a_branch(tiny_model: Path) -> None:
    """A pool that is just large enough without branches."""
    num_blocks = sum(-(-(len(prompt) + LENGTH) // 4) for prompt in PROMPTS)
    with make(tiny_model, kv={"use": "paged", "block_size": 4, "num_blocks": num_blocks}) as engine:
        outputs = engine.generate([ids(*prompt) for prompt in PROMPTS], PARAMS)
        assert [output.metrics.num_preemptions for output in outputs if output.metrics] == [0] * len(PROMPTS)


def test_branches_save_steps(tiny_model: Path) -> None:
    """Else the equality above would say little: with the shapes in turn, most steps give several tokens."""
    with make(tiny_model) as engine:
        core: Any = engine._core
        before = core._step_index
        engine.generate(ids(*PROMPTS[0]), PARAMS)
        assert core._step_index - before <= LENGTH * 0.7


def test_only_drafts_of_the_way_that_was_taken_count(tiny_model: Path) -> None:
    with make(tiny_model) as engine:
        output = engine.generate(ids(*PROMPTS[0]), PARAMS)[0]
        assert output.metrics is not None
        assert 0 < output.metrics.num_accepted <= output.metrics.num_drafted <= 4 * LENGTH
