"""The contract kit of attention on every implementation of this package."""

from __future__ import annotations

import pytest

from pluglm.testing.attention import attention_checks
from pluglm.testing.check import Check, cases
from pluglm_attention.naive import NaiveAttention
from pluglm_attention.sdpa import SdpaAttention


@pytest.mark.parametrize("check", **cases(attention_checks(NaiveAttention)))
def test_naive(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(attention_checks(SdpaAttention)))
def test_sdpa(check: Check) -> None:
    check.run()
