"""The contract kit of searches on beam search: narrow, wide, and with each of its options."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.search import search_checks
from pluglm_samplers.beam_search import BeamSearch

EARLY = {"width": 3, "early_stopping": True, "length_penalty": 0.0}


@pytest.mark.parametrize("check", **cases(search_checks(BeamSearch, options={"width": 2})))
def test_narrow_beam(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(search_checks(BeamSearch, options={"width": 32}, num_results=5)))
def test_beam_wider_than_the_vocabulary(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(search_checks(BeamSearch, options=EARLY)))
def test_beam_that_stops_early(check: Check) -> None:
    check.run()
