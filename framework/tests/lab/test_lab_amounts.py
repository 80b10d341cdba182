"""Drawn numbers against the moments and bounds of their distributions."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from pluglm.lab.amounts import Amount, Lengths
from pluglm.lab.arrivals import Arrivals

COUNT = 20_000


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("data", "mean", "low", "high"),
    [
        (2.5, 2.5, 2.5, 2.5),
        ({"uniform": {"min": 1, "max": 4}}, 2.5, 1, 4),
        ({"exponential": 3.0}, 3.0, 0, np.inf),
        ({"values": [1, 1, 4]}, 2.0, 1, 4),
        ({"lognormal": {"median": 2.0, "sigma": 0.5}}, 2.0 * np.exp(0.125), 0, np.inf),  # median * exp(sigma^2 / 2)
    ],
)
def test_the_mean_is_that_of_the_distribution(data, mean, low, high, generator):
    drawn = Amount.model_validate(data).draw(generator, COUNT)
    assert drawn.shape == (COUNT,)
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.min() >= low
    assert drawn.max() <= high


def test_a_lognormal_has_its_median_and_its_clip(generator):
    drawn = Amount.model_validate({"lognormal": {"median": 10, "sigma": 1, "min": 5, "max": 30}}).draw(generator, COUNT)
    assert np.median(drawn) == pytest.approx(10, rel=0.05)
    assert (drawn.min(), drawn.max()) == (5, 30)
    below = (drawn == 5).mean()
    assert below == pytest.approx(0.2441, abs=0.01)  # P(N(0, 1) < ln(5 / 10)), from a table of the normal distribution


def test_lengths_are_whole_and_uniform_ones_hit_both_ends_alike(generator):
    drawn = Lengths.model_validate({"uniform": {"min": 2, "max": 4}}).draw(generator, COUNT)
    assert drawn.dtype == np.int64
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [2, 3, 4]
    np.testing.assert_allclose(counts / COUNT, 1 / 3, atol=0.02)


def test_lengths_are_never_below_one(generator):
    drawn = Lengths.model_validate({"lognormal": {"median": 1, "sigma": 2}}).draw(generator, 1000)
    assert drawn.min() == 1
    assert (drawn == np.rint(drawn)).all()


@pytest.mark.parametrize(
    ("model", "data", "reason"),
    [
        (Amount, {}, "exactly one of constant, uniform, lognormal, exponential, values, not none"),
        (Amount, {"constant": 1, "exponential": 2}, "not constant and exponential"),
        (Amount, {"uniform": {"min": 3, "max": 1}}, "min 3 is above max 1"),
        (Amount, {"lognormal": {"median": 1, "sigma": 1, "min": 3, "max": 2}}, "min 3 is above max 2"),
        (Amount, -1, "greater than or equal to 0"),
        (Amount, True, "valid dictionary"),
        (Amount, {"exponential": 0}, "greater than 0"),
        (Amount, {"values": []}, "at least 1 item"),
        (Amount, {"constant": float("inf")}, "finite number"),
        (Lengths, 0, "1 or more, not 0"),
        (Lengths, 2.5, "whole number, 1 or more, not 2.5"),
        (Lengths, {"uniform": {"min": 0, "max": 3}}, "1 or more, not 0"),
        (Lengths, {"values": [4, 0]}, "1 or more, not 0"),
        (Arrivals, {"poisson": {"rate": 0}}, "greater than 0"),
        (Arrivals, {"times": [0], "at_once": True}, "not at_once and times"),
    ],
)
def test_what_is_no_distribution_is_refused(model, data, reason):
    with pytest.raises(ValidationError, match=reason):
        model.model_validate(data)


def test_poisson_gaps_are_exponential(generator):
    """Mean 1 / rate, and as large a standard deviation."""
    times = Arrivals.model_validate({"poisson": {"rate": 4.0}}).draw(generator, COUNT)
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)


def test_bursts_run_and_rest(generator):
    """All arrivals fall into the first 2 of every 7 seconds, evenly, and 5 per second of those."""
    times = Arrivals.model_validate({"bursts": {"rate": 5.0, "on_s": 2.0, "off_s": 5.0}}).draw(generator, COUNT)
    phase = times % 7.0
    assert (np.diff(times) >= 0).all()
    assert phase.max() <= 2.0
    assert phase.mean() == pytest.approx(1.0, rel=0.03)
    assert COUNT / times[-1] == pytest.approx(5.0 * 2 / 7, rel=0.03)


def test_given_times_and_all_at_once(generator):
    assert Arrivals.model_validate({"times": [3, 0.5, 1]}).draw(generator, 0).tolist() == [0.5, 1.0, 3.0]
    assert Arrivals.model_validate({"at_once": True}).draw(generator, 3).tolist() == [0.0, 0.0, 0.0]
