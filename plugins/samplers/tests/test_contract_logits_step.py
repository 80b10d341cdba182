"""The contract kit of logits steps on every step that this package registers."""

from __future__ import annotations

import pytest

from pluglm.assembly.registry import list_entries, load
from pluglm.testing.check import Check
from pluglm.testing.logits_step import logits_step_checks
from pluglm_samplers.presets import PRESETS

STEPS = {entry.name: load(entry) for entry in list_entries("logits_step") if entry.distribution == "pluglm-samplers"}
CHECKS = {f"{name}-{check.name}": check for name, step in STEPS.items() for check in logits_step_checks(step)}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_step(check: Check) -> None:
    check.run()


def test_no_step_was_missed() -> None:
    assert set(STEPS) == {name for steps in PRESETS.values() for name in steps}
