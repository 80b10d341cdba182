"""The contract kit of scheduling policies on fcfs and priority, the latter with and without ageing."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.scheduling_policy import scheduling_policy_checks
from pluglm_schedulers.fcfs import FcfsPolicy
from pluglm_schedulers.priority import PriorityConfig, PriorityPolicy


@pytest.mark.parametrize("check", **cases(scheduling_policy_checks(FcfsPolicy)))
def test_fcfs(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(scheduling_policy_checks(PriorityPolicy)))
def test_priority(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(scheduling_policy_checks(PriorityPolicy, PriorityConfig(ageing=0.05))))
def test_priority_with_ageing(check: Check) -> None:
    check.run()
