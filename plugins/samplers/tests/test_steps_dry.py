"""DRY token by token, with costs worked out by hand: which copies count, how far back, and where breakers cut."""

from __future__ import annotations

import pytest
import torch
from sampler_cases import row, step

from pluglm.kernel.sampling_params import SamplingParams

PERIOD = (1, 2, 3, 4, 1, 2, 3)  # ends with 1 2 3, which 4 followed


def costs(text: tuple[int, ...], num_prompt: int = 0, **params: float | tuple[int, ...]) -> dict[int, float]:
    """What each penalised token loses. multiplier 1, base 2, allowed length 2 unless given."""
    chosen = SamplingParams(**{"dry_multiplier": 1.0, "dry_base": 2.0, **params})  # type: ignore[arg-type]
    one = row(chosen, prompt=text[:num_prompt], output=text[num_prompt:])
    lost_V = -step("dry", 10).apply(torch.zeros(1, 10), [one])[0]
    return {token: float(loss) for token, loss in enumerate(lost_V) if loss}


def test_the_token_that_would_lengthen_the_copy_pays_by_its_length() -> None:
    assert costs(PERIOD) == {4: 2.0}  # a run of 3: 1 * 2 ** (3 - 2)
    assert costs(PERIOD, dry_allowed_length=3) == {4: 1.0}
    assert costs(PERIOD, dry_allowed_length=4) == {}
    assert costs(PERIOD, dry_multiplier=0.5, dry_base=3.0, dry_allowed_length=1) == {4: 4.5}


@pytest.mark.parametrize("num_prompt", range(8))
def test_prompt_and_output_are_one_context(num_prompt: int) -> None:
    assert costs(PERIOD, num_prompt) == {4: 2.0}


def test_the_longest_copy_of_each_token_counts() -> None:
    # the end 2 3 came twice: 1 2 3 4 is a run of 2 tokens before 4; 9 2 3 5 is a run of 3 before 5
    assert costs((1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3)) == {4: 1.0, 5: 2.0}
    assert costs((2, 3, 4, 9, 2, 3, 4, 9, 2, 3)) == {4: 16.0}  # runs of 2 and of 6: 2 ** (6 - 2), not the sum


def test_a_copy_may_overlap_the_end() -> None:
    assert costs((7, 7, 7, 7)) == {7: 2.0}  # 7 7 7 came before the last 7
    assert costs((1, 2, 1, 2, 1, 2)) == {1: 4.0}


def test_breakers_cut_runs_and_pay_nothing() -> None:
    assert costs(PERIOD, dry_breaker_ids=(1,)) == {4: 1.0}  # behind the last 1: a run of 2
    assert costs(PERIOD, dry_breaker_ids=(2,)) == {}  # behind the last 2: a run of 1
    assert costs(PERIOD, dry_breaker_ids=(3,)) == {}  # the context ends with a breaker
    assert costs(PERIOD, dry_breaker_ids=(4,)) == {}  # the token itself is one
    assert costs(PERIOD, dry_breaker_ids=(8, 9)) == {4: 2.0}


def test_nothing_to_copy() -> None:
    for text in ((), (1,), (1, 2, 3), (1, 1)):
        assert costs(text) == {}


def test_contexts_of_a_batch_do_not_run_into_each_other() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0)
    rows = [row(params, output=one) for one in ((1, 2, 3), (1, 2), (), PERIOD, (4, 1, 2))]
    found_RV = step("dry", 10).apply(torch.zeros(5, 10), rows)
    assert torch.nonzero(found_RV).tolist() == [[3, 4]]
    assert float(found_RV[3, 4]) == -2.0


def test_a_run_without_end_costs_the_largest_number_and_no_more() -> None:
    largest = torch.finfo(torch.float32).max
    assert costs((5,) * 4000) == {5: largest}
    assert costs((5,) * 4000, dry_base=1.0, dry_multiplier=0.25) == {5: 0.25}
    assert costs((5,) * 4000, dry_multiplier=1e300, dry_base=1e300) == {5: largest}
    # below saturation the length still counts: 40 runs to 39, so 1.1 ** 37
    assert costs((5,) * 40, dry_base=1.1)[5] == pytest.approx(1.1**37, rel=1e-6)
