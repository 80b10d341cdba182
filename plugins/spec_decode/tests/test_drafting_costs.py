"""Measured times of drafting against those that they were made from."""

from __future__ import annotations

import random

import pytest

from pluglm_spec_decode.drafting_costs import DraftingCosts


def test_rounds_and_tokens_are_told_apart():
    """A round takes 4 ms and a token that is caught up with 0.2 ms; some calls take ten times as long."""
    costs, generator = DraftingCosts(), random.Random(2)
    for call in range(60):
        rounds, behind = generator.randint(1, 4), generator.choice((0, 0, 0, 150, 400))
        seconds = 0.004 * rounds + 0.0002 * behind
        costs.note(rounds, behind, seconds * (10 if call % 7 == 3 else 1))
    assert costs.round_time == pytest.approx(0.004)
    assert costs.token_time == pytest.approx(0.0002, rel=0.01)


def test_catching_up_is_known_in_the_long_run():
    """100 tokens in every twentieth step, of 1 ms each."""
    costs, seen = DraftingCosts(), []
    for call in range(2000):
        costs.note(1, 0 if call % 20 else 100, 0.0 if call % 20 else 0.1)
        seen.append(costs.catching_up_time)
    assert sum(seen[-200:]) / 200 == pytest.approx(0.1 / 20, rel=0.05)
