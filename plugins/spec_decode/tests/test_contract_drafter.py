"""The contract kit of drafters on ngram, and on draft_model over the kit's table model."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.drafter import drafter_checks
from pluglm_spec_decode.draft_model import DraftModelConfig, DraftModelDrafter
from pluglm_spec_decode.ngram import NgramDrafter
from pluglm_spec_decode.self_layers import SelfLayersConfig, SelfLayersDrafter


@pytest.mark.parametrize("check", **cases(drafter_checks(NgramDrafter)))
def test_ngram(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(drafter_checks(DraftModelDrafter, DraftModelConfig(model="table"))))
def test_draft_model(check: Check) -> None:
    check.run()


@pytest.mark.parametrize(
    "check", **cases(drafter_checks(DraftModelDrafter, DraftModelConfig(model="table"), max_step_tokens=3))
)
def test_draft_model_that_catches_up_in_small_steps(check: Check) -> None:
    check.run()


DRAWS = DraftModelConfig(model="table", draws=True)


@pytest.mark.parametrize("check", **cases(drafter_checks(DraftModelDrafter, DRAWS)))
def test_draft_model_that_draws(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("draws", [False, True])
def test_self_layers(draws: bool) -> None:
    """In one test for all checks: their names are those of draft_model's."""
    for check in drafter_checks(SelfLayersDrafter, SelfLayersConfig(num_layers=1, draws=draws)):
        check.run()
