"""The contract kit of samplers on the chain (with and without its default steps) and on the greedy one."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.sampler import sampler_checks
from pluglm_samplers.chain import ChainSampler
from pluglm_samplers.greedy import GreedySampler

TEMPERATURE_ONLY = ChainSampler.Config.model_validate({"steps": ["temperature"]})


@pytest.mark.parametrize("check", **cases(sampler_checks(ChainSampler)))
def test_chain(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(sampler_checks(ChainSampler, TEMPERATURE_ONLY)))
def test_short_chain(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(sampler_checks(GreedySampler)))
def test_greedy(check: Check) -> None:
    check.run()
