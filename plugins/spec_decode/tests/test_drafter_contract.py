"""Both drafters against the contract kit."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.drafter import drafter_checks
from pluglm_spec_decode.draft_model import DraftModelConfig, DraftModelDrafter
from pluglm_spec_decode.ngram import NgramDrafter


@pytest.mark.parametrize("check", **cases(drafter_checks(NgramDrafter)))
def test_ngram(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(drafter_checks(DraftModelDrafter, DraftModelConfig(model="any"))))
def test_draft_model(check: Check) -> None:
    check.run()
