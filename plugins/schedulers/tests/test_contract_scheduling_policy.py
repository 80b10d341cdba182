"""The contract kit of scheduling policies on each of ours, those that age with and without it."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.scheduling_policy import scheduling_policy_checks
from pluglm_schedulers.fair import FairConfig, FairPolicy
from pluglm_schedulers.fcfs import FcfsPolicy
from pluglm_schedulers.priority import PriorityConfig, PriorityPolicy
from pluglm_schedulers.shortest_first import ShortestFirstConfig, ShortestFirstPolicy


@pytest.mark.parametrize("check", **cases(scheduling_policy_checks(FcfsPolicy)))
def test_fcfs(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(scheduling_policy_checks(PriorityPolicy)))
def test_priority(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(scheduling_policy_checks(PriorityPolicy, PriorityConfig(ageing=0.05))))
def test_priority_with_ageing(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(scheduling_policy_checks(ShortestFirstPolicy)))
def test_shortest_first(check: Check) -> None:
    check.run()


@pytest.mark.parametrize(
    "check", **cases(scheduling_policy_checks(ShortestFirstPolicy, ShortestFirstConfig(ageing=None)))
)
def test_shortest_first_without_ageing(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(scheduling_policy_checks(FairPolicy)))
def test_fair(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(scheduling_policy_checks(FairPolicy, FairConfig(output_weight=0.5))))
def test_fair_with_dear_prompts(check: Check) -> None:
    check.run()
