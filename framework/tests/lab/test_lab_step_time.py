"""The fit against exact data, brute force and simulated runs whose prices are known; the file that keeps it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm.kernel.core import CacheKey, PlanItem, RequestView
from pluglm.kernel.errors import ConfigError
from pluglm.lab.generate import generate
from pluglm.lab.simulate import simulate
from pluglm.lab.step_time import (
    StepTime,
    fit_step_time,
    non_negative_least_squares,
    read_step_time,
    relative_errors,
    write_step_time,
)
from pluglm.lab.steps import Step, Work, item_work
from pluglm.lab.workload import Workload

MODEL = StepTime(step_base_s=0.02, token_s=5e-4, row_s=3e-4, chunk_s=2e-3, context_s=4e-7)


def steps_of(model: StepTime, count: int = 200, noise: float = 0.0) -> list[Step]:
    generator = np.random.default_rng(0)
    steps = []
    for _ in range(count):
        decodes, chunks = int(generator.integers(0, 12)), int(generator.integers(0, 3))
        tokens = decodes + chunks * int(generator.integers(2, 100)) or 1
        work = {"num_rows": decodes, "num_chunks": chunks, "num_keys": tokens * int(generator.integers(1, 900))}
        exact = model.seconds(Step(seconds=0, num_tokens=tokens, **work))
        steps.append(Step(seconds=exact * generator.lognormal(0, noise), num_tokens=tokens, **work))
    return steps


def assert_near(found: StepTime, expected: StepTime, rel: float) -> None:
    for name, value in expected.model_dump().items():
        assert getattr(found, name) == pytest.approx(value, rel=rel, abs=1e-12), name


def test_exact_steps_give_the_model_back():
    assert_near(fit_step_time(steps_of(MODEL)), MODEL, rel=1e-6)


def test_a_price_of_nothing_is_found_to_be_nothing():
    free = MODEL.model_copy(update={"row_s": 0.0, "context_s": 0.0})
    assert_near(fit_step_time(steps_of(free)), free, rel=1e-6)


def test_noise_and_a_few_slow_steps_move_the_model_little():
    steps = steps_of(MODEL, count=2000, noise=0.1)
    slow = [one.model_copy(update={"seconds": 30 * one.seconds}) for one in steps[:20]]
    found = fit_step_time(steps[20:] + slow)
    errors = relative_errors(found, steps[20:])
    assert abs(errors["total"]) < 0.02
    assert errors["median"] == pytest.approx(0.0674, abs=0.01)  # the median of |N(0, 0.1^2)|
    assert min(found.model_dump().values()) >= 0


def test_errors_by_hand():
    model = StepTime(step_base_s=1.0)
    steps = [Step(seconds=s, num_tokens=1, num_rows=1, num_chunks=0, num_keys=1) for s in (0.5, 1.0, 2.0)]
    assert relative_errors(model, steps) == pytest.approx({"total": 3 / 3.5 - 1, "median": 0.5, "p90": 0.9})


def test_too_few_steps_are_refused():
    with pytest.raises(ConfigError, match="4 steps cannot fit 5 coefficients; measure a longer run"):
        fit_step_time(steps_of(MODEL, count=4))


@given(seed=st.integers(0, 10**6), num_columns=st.integers(1, 4))
def test_least_squares_is_the_best_of_all_sets_of_free_columns(seed: int, num_columns: int):
    """Lawson and Hanson's solution is the best among the plain solutions over every subset that are not negative."""
    generator = np.random.default_rng(seed)
    matrix = generator.normal(size=(12, num_columns)) * 10.0 ** generator.integers(-4, 4, num_columns)
    target = generator.normal(size=12)
    best = float(np.linalg.norm(target))
    for chosen in itertools.product((False, True), repeat=num_columns):
        columns = matrix[:, np.array(chosen)]
        if columns.shape[1]:
            x = np.linalg.lstsq(columns, target, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(columns @ x - target)))
    found = non_negative_least_squares(matrix, target)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("kv", ["paged", "hash_prefix", "radix"])
def test_a_simulated_run_is_measured_at_its_own_prices(kv: str, make_config):
    """What the hook sees of every step is what the backend was paid for: caching, preemption and chunks included."""
    stream = {
        "num_arrivals": 30,
        "arrivals": {"poisson": {"rate": 8}},
        "prompt": {"uniform": {"min": 1, "max": 120}},
        "output": {"uniform": {"min": 1, "max": 20}},
        "prefixes": {"num_groups": 2, "length": 40},
        "sessions": {"turns": {"values": [1, 2, 3]}, "think_s": 1.0},
    }
    trace = generate(Workload.model_validate({"streams": [stream]}))
    config = make_config(kv={"use": kv, "block_size": 4, "num_blocks": 120}, max_num_seqs=6)
    run = simulate(config, trace, MODEL)
    assert len(run.steps) > 100
    assert sum(one.num_preemptions for one in run.outcomes) > 0
    exact = [step for step in run.steps if step.seconds == pytest.approx(MODEL.seconds(step), rel=1e-9)]
    assert len(exact) >= 0.99 * len(run.steps)  # all, but for evictions between the plan and the question
    assert_near(fit_step_time(run.steps), MODEL, rel=0.02)


def view(**fields) -> RequestView:
    known = {"request_id": "r", "tenant": "", "priority": 0, "arrival_s": 0.0, "num_output": 0, "max_new_tokens": 9}
    return RequestView(sequence_id=1, num_preemptions=0, **{**known, "num_drafts": 0, **fields})


def test_the_work_of_an_item():
    running = view(num_prompt=8, num_known=10, num_computed=4, holds_kv=True)
    assert item_work(PlanItem(1, 3), running, starts=False) == Work(3, 0, 1, 5 + 6 + 7)
    assert item_work(PlanItem(1, 6), running, starts=False) == Work(6, 1, 1, 5 + 6 + 7 + 8 + 9 + 10)
    assert item_work(PlanItem(1, 1), view(num_prompt=8, num_known=10, num_computed=9), starts=False) == Work(
        1, 1, 0, 10
    )
    drafted = view(num_prompt=8, num_known=10, num_computed=9, num_drafts=2)
    assert item_work(PlanItem(1, 3), drafted, starts=False) == Work(3, 3, 1, 10 + 11 + 12)
    key = CacheKey(namespace=b"", token_ids=range(8), limit=7)
    cached = view(num_prompt=8, num_known=8, num_computed=0, cache_key=key, probe=lambda key: 4)
    assert item_work(PlanItem(1, 4), cached, starts=True) == Work(4, 1, 1, 5 + 6 + 7 + 8)


def test_a_file_is_read_again(tmp_path: Path):
    path = tmp_path / "step-time.json"
    write_step_time(path, MODEL, {"num_steps": 7})
    assert read_step_time(path) == MODEL
    assert '"num_steps": 7' in path.read_text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ('{"token_s": -1}', "token_s: Input should be greater than or equal to 0"),
        ('{"tokens_s": 1}', r"tokens_s: unknown key, did you mean 'token_s'\?"),
        ("[]", "top level"),
    ],
)
def test_a_bad_file_is_one_line(text: str, reason: str, tmp_path: Path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_step_time(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_step_time(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_step_time(tmp_path, MODEL, {})
