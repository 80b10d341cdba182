"""The contract kit of drafters on suffix, and on adaptive drafters with a cost that no clock decides."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.drafter import drafter_checks
from pluglm_spec_decode.ngram import NgramConfig, NgramDrafter
from pluglm_spec_decode.suffix import SuffixConfig, SuffixDrafter


@pytest.mark.parametrize("check", **cases(drafter_checks(SuffixDrafter, SuffixConfig(shared_tokens=0))))
def test_suffix_alone(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(drafter_checks(SuffixDrafter)))
def test_suffix_that_shares(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(drafter_checks(NgramDrafter, NgramConfig(adaptive=True, draft_cost=0.1))))
def test_adaptive_ngram(check: Check) -> None:
    check.run()


@pytest.mark.parametrize(
    "check", **cases(drafter_checks(SuffixDrafter, SuffixConfig(shared_tokens=0, adaptive=True, draft_cost=0.1)))
)
def test_adaptive_suffix(check: Check) -> None:
    check.run()
