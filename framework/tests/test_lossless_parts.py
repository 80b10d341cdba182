"""What the kit of verification is made of: volumes of boxes, filters by hand, tables that are what they say."""

from __future__ import annotations

import numpy as np
import pytest

from pluglm.testing.lossless_boxes import Floats, Ints, measure
from pluglm.testing.lossless_chains import cases, drawn, most_likely
from pluglm.testing.lossless_filters import everything, grammar, min_p, penalties, softmax, top_p
from pluglm.testing.lossless_runs import Verifier, enumerate_chains
from pluglm.testing.lossless_tables import filtered_chains, searched_chain, sweep_chains
from pluglm.verification import token

LOG = np.log(np.array([0.4, 0.3, 0.2, 0.1]))


def test_volumes_of_thresholds_are_exact() -> None:
    """Two uniforms against thresholds of their own; the second counts only where the first is small."""
    first, second = np.array([0.3, 0.75]), np.array([1 / 3, 0.999])

    def evaluate(case_N: Ints, uniforms: Floats) -> Ints:
        is_small = uniforms[:, 0] < first[case_N]
        return np.where(is_small, (uniforms[:, 1] < second[case_N]).astype(np.int64), 2)

    expected = np.stack([first * (1 - second), first * second, 1 - first], 1)
    assert np.allclose(measure(evaluate, 2, 2, 3), expected, atol=1e-9, rtol=0)


def test_what_is_no_step_function_is_refused() -> None:
    def evaluate(case_N: Ints, uniforms: Floats) -> Ints:
        return ((uniforms[:, 0] > 0.3) & (uniforms[:, 0] < 0.6)).astype(np.int64)

    with pytest.raises(ValueError, match="no step function of the uniforms"):
        measure(evaluate, 1, 1, 2)


def test_what_changes_from_call_to_call_is_refused() -> None:
    random = np.random.default_rng(3)

    def evaluate(case_N: Ints, uniforms: Floats) -> Ints:
        return random.integers(0, 1000, len(case_N))

    with pytest.raises(ValueError, match="no step function of the uniforms"):
        measure(evaluate, 1, 2, 1000)


def test_truncations_by_hand() -> None:
    """0.4 + 0.3 + 0.2 is the first mass of 0.8 or more; 0.3 of the best is 0.12; of five equal ones four hold 0.8."""
    assert np.allclose(softmax(top_p(LOG, ())), [4 / 9, 3 / 9, 2 / 9, 0])
    assert np.allclose(softmax(min_p(LOG, ())), [4 / 9, 3 / 9, 2 / 9, 0])
    assert np.allclose(softmax(top_p(np.zeros(4), ())), 0.25)
    assert np.allclose(softmax(top_p(np.zeros(5), ())), [0.25, 0.25, 0.25, 0.25, 0])


def test_penalties_by_hand() -> None:
    """The prompt is token 0. Repetition once a token, divided where positive; frequency by count, presence once."""
    found = penalties(np.array([1.4, -1.0, 2.8, 0.5]), (2, 1, 2))
    assert np.allclose(found, [1.0, -1.4 - 0.4 - 0.6, 2.0 - 0.8 - 0.6, 0.5])


def test_the_grammar_by_hand() -> None:
    assert np.isinf(grammar(LOG, (1,))).tolist() == [False, True, False, False]
    assert np.isinf(grammar(LOG, (3, 0))).tolist() == [True, False, False, True]
    assert not np.isinf(grammar(LOG, ())).any()
    assert np.isinf(everything(LOG, (1,)))[1]


def test_chances_of_proposals_sum_to_one() -> None:
    for chain in (*filtered_chains(3, 2).values(), searched_chain(), *sweep_chains(2)):
        for proposes in (drawn, most_likely):
            total = sum(float(some.chance_C.sum()) for some in cases([chain], proposes))
            assert total == pytest.approx(1.0)


def test_the_joint_law_is_the_product_of_rows() -> None:
    chain = searched_chain()
    joint = chain.joint().reshape(3, 3, 3)
    assert joint.sum() == pytest.approx(1.0)
    assert joint[0, 1, 2] == pytest.approx(4 / 20 * 15 / 20 * chain.target[2][1, 2])


def test_tables_of_the_sweep_refuse_often() -> None:
    for chain in sweep_chains(20):
        assert min(rows.min() for rows in (*chain.target, *chain.draft)) >= 0.02
        assert np.minimum(chain.target[0], chain.draft[0]).sum() <= 0.7
        assert all(np.allclose(rows.sum(1), 1.0) for rows in (*chain.target, *chain.draft))


def test_a_wrong_reach_is_noticed() -> None:
    """The enumeration does not take the chance of acceptance from the closed form that it is compared with."""
    exact = enumerate_chains(Verifier(rule=token, reach=lambda p, q: np.zeros_like(p)), [searched_chain()])[0]
    p, q = searched_chain().target[0][0], searched_chain().draft[0][0]
    assert exact.kept[0] == pytest.approx(float(np.minimum(p, q).sum()), abs=1e-6)
    assert exact.kept_due.tolist() == [0.0, 0.0]
