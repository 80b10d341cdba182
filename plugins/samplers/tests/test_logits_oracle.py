"""The steps against the float64 oracle: same kept set, same probabilities, over random and adversarial rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import chain, random_logits, random_row, row
from sampling_oracle import distribution, penalised

from pluglm.kernel.core import SampleRow
from pluglm.kernel.sampling_params import SamplingParams


def transformed(logits_RV: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """What the chain draws from."""
    sampler = chain(logits_RV.shape[1])
    result_RV = logits_RV.clone()
    for name, step in zip(sampler._names, sampler._steps, strict=True):
        active = [index for index, one in enumerate(rows) if step.is_active(one.params)]
        if active:
            result_RV[active] = step.apply(result_RV[active], [rows[index] for index in active])
            assert bool((result_RV.amax(-1) > -torch.inf).all()), name
    return result_RV


@pytest.mark.parametrize("vocab_size", [5, 17, 1000])
def test_kept_set_and_probabilities_equal_the_oracle(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    rows = [random_row(generator, vocab_size) for _ in range(200)]
    logits_RV = random_logits(len(rows), vocab_size, seed=vocab_size)
    result_RV = transformed(logits_RV, rows).double().softmax(-1).numpy()
    compared = 0
    for index, one in enumerate(rows):
        expected, margin = distribution(logits_RV[index].double().numpy(), one)
        if margin < 1e-4 and one.params.min_p != 1.0:
            continue  # float32 may decide either way at the threshold; exact boundaries are tested below
        np.testing.assert_array_equal(result_RV[index] > 0, expected > 1e-300, err_msg=repr(one))
        np.testing.assert_allclose(result_RV[index], expected, rtol=2e-4, atol=1e-7)
        compared += 1
    assert compared > 120


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_penalties_equal_the_oracle(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([3, 9]))
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=8)
    logits = data.draw(
        st.lists(st.sampled_from([-3.5, -1.0, 0.0, 0.25, 2.0]), min_size=vocab_size, max_size=vocab_size)
    )
    params = SamplingParams(
        repetition_penalty=data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        frequency_penalty=data.draw(st.sampled_from([-0.5, 0.0, 0.3])),
        presence_penalty=data.draw(st.sampled_from([-1.0, 0.0, 0.6])),
    )
    one = row(params, prompt=tuple(data.draw(ids)), output=tuple(data.draw(ids)))
    result_RV = transformed(torch.tensor([logits]), [one])
    np.testing.assert_allclose(result_RV[0].numpy(), penalised(np.array(logits), one), rtol=1e-6, atol=1e-6)


def kept(logits: list[float], **params: float) -> list[int]:
    result_RV = transformed(torch.tensor([logits]), [row(SamplingParams(**params))])  # type: ignore[arg-type]
    return torch.nonzero(result_RV[0] > -torch.inf).flatten().tolist()


def test_exact_boundaries_on_two_to_the_n_equal_logits() -> None:
    # Eight equal logits: every probability is exactly 1/8, so the prefix with mass >= p has ceil(8 p) tokens.
    for top_p, count in ((0.125, 1), (0.1251, 2), (0.5, 4), (0.5001, 5), (0.875, 7), (0.0, 1)):
        assert kept([1.5] * 8, top_p=top_p) == list(range(count))
    assert kept([1.5] * 8, min_p=1.0) == list(range(8))
    assert kept([1.5] * 8, top_k=3) == [0, 1, 2]


def test_ties_rank_by_id_and_masked_tokens_never_return() -> None:
    inf = float("inf")
    assert kept([0.0, 2.0, 1.0, 2.0, 1.0, 1.0], top_k=4) == [1, 2, 3, 4]
    assert kept([-inf, 1.0, -inf, 1.0], top_k=3) == [1, 3]
    assert kept([-inf, 1.0, -inf, 1.0], top_p=0.5) == [1]
    assert kept([-inf, -inf, 7.0], top_p=0.3, min_p=0.9, top_k=2, temperature=1e-4) == [2]


def test_renormalised_between_stages() -> None:
    # p = 0.4, 0.3, 0.3: top_k=2 leaves 4/7 and 3/7, so top_p=0.55 keeps one token (on the raw row it would keep two).
    logits = torch.tensor([0.4, 0.3, 0.3]).log().tolist()
    assert kept(logits, top_p=0.55) == [0, 1]
    assert kept(logits, top_p=0.55, top_k=2) == [0]


def test_nucleus_larger_than_the_head_needs_the_full_sort() -> None:
    assert kept([0.0] * 4096, top_p=0.75) == list(range(3072))


def test_tiny_and_huge_values_stay_finite_and_never_empty_a_row() -> None:
    extreme = [3e38, -3e38, 1e-30, 0.0]
    for params in (
        {"temperature": 1.1e-5}, {"temperature": 1e300}, {"repetition_penalty": 1e300}, {"repetition_penalty": 1e-300},
        {"frequency_penalty": 1e300}, {"frequency_penalty": -1e300}, {"presence_penalty": 3.4e38},
    ):  # fmt: skip
        one = row(SamplingParams(**params), prompt=(0, 1, 2, 3), output=(0, 0, 1, 2, 3))  # type: ignore[arg-type]
        result_RV = transformed(torch.tensor([extreme]), [one])
        assert not bool(result_RV.isnan().any())
        assert bool(result_RV.amax(-1).isfinite().all())


def test_ids_outside_the_vocabulary_are_an_error() -> None:
    for bad in (-1, 4):
        with pytest.raises(ValueError, match="leave the vocabulary of 4"):
            transformed(torch.zeros(1, 4), [row(SamplingParams(presence_penalty=1.0), output=(bad,))])


def test_neutral_parameters_leave_every_bit() -> None:
    logits_RV = random_logits(8, 17, seed=1)
    assert torch.equal(transformed(logits_RV, [row(prompt=(1, 2), output=(3,))] * 8), logits_RV)


def test_argmax_invariance_is_true_where_it_is_claimed() -> None:
    generator = np.random.default_rng(3)
    rows = [random_row(generator, 17) for _ in range(2000)]
    logits_RV = random_logits(len(rows), 17, seed=4)
    for name, step in zip(chain(17)._names, chain(17)._steps, strict=True):
        active = [index for index, one in enumerate(rows) if step.is_active(one.params)]
        changed_RV = step.apply(logits_RV[active].clone(), [rows[index] for index in active])
        moved = bool((changed_RV.argmax(-1) != logits_RV[active].argmax(-1)).any())
        assert moved != step.argmax_invariant, name
