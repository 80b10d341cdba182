"""The contract kit of whole schedulers on static_batch."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.scheduler import scheduler_checks
from pluglm_schedulers.static_batch import StaticBatchScheduler


@pytest.mark.parametrize("check", **cases(scheduler_checks(StaticBatchScheduler)))
def test_contract(check: Check) -> None:
    check.run()
