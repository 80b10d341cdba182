"""Estimated chances against the shares that outcomes were drawn with, and against counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm_spec_decode.acceptance import MEMORY, TRUST, Acceptance


def taught(share: float, steps: int, sequences: int = 8, seed: int = 1) -> Acceptance:
    """Each step has one draft of class 0, kept with this chance."""
    acceptance, generator = Acceptance([0.5]), random.Random(seed)
    for step in range(steps):
        acceptance.observe(step % sequences, [0], int(generator.random() < share))
    return acceptance


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_of_a_class_is_found(share):
    """Within four standard errors of so many draws."""
    error = (share * (1 - share) / MEMORY) ** 0.5
    assert taught(share, 2000).share(0) == pytest.approx(share, abs=4 * error)


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=6))
def test_survival_is_the_product_of_the_chances(priors):
    acceptance = Acceptance(priors)
    product = 1.0
    for kind, chance in enumerate(acceptance.survival(7, range(len(priors)))):
        (alone,) = acceptance.survival(7, [kind])
        product *= alone
        assert chance == pytest.approx(product)
        assert alone == pytest.approx(priors[kind], abs=0.01)


def test_survival_ends_where_it_is_below_the_least():
    found = Acceptance([0.5]).survival(0, [0] * 8, least=0.2)
    assert found == pytest.approx([0.5, 0.25])


def test_drafts_behind_a_refused_one_say_nothing():
    acceptance = Acceptance([0.5, 0.5, 0.5])
    acceptance.observe(0, [0, 1, 2], 1)
    assert acceptance.share(0) > 0.5 > acceptance.share(1)
    assert acceptance.share(2) == 0.5


def test_a_sequence_departs_from_its_class_and_is_given_another_chance():
    acceptance = Acceptance([0.8])
    for _ in range(12):
        acceptance.observe(1, [0], 0)
        for other in range(2, 12):
            acceptance.observe(other, [0], 1)
    [bad], [good] = acceptance.survival(1, [0]), acceptance.survival(2, [0])
    assert bad < 0.5 < 0.85 < good
    for _ in range(2000):
        acceptance.observe(1, [], 0)
    assert acceptance.survival(1, [0])[0] == pytest.approx(acceptance.survival(99, [0])[0], abs=0.01)


def test_a_released_sequence_is_as_a_new_one():
    acceptance = taught(0.9, 50, sequences=2)
    acceptance.release(0)
    assert acceptance.survival(0, [0]) == acceptance.survival(99, [0])


def test_a_doubted_class_learns_as_at_first():
    acceptance = taught(0.0, 1000)
    before = acceptance.share(0)
    acceptance.doubt(0)
    assert acceptance.share(0) == pytest.approx(before)
    for sequence_id in range(TRUST):
        acceptance.observe(sequence_id, [0], 1)
    assert acceptance.share(0) == pytest.approx(0.5, abs=0.05)  # as many kept now as were trusted before
