"""The contract kit of quantizers on int8 and int4."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.quantizer import quantizer_checks
from pluglm_quant.int4 import Int4Config, Int4Quantizer
from pluglm_quant.int8 import Int8Quantizer


@pytest.mark.parametrize("check", **cases(quantizer_checks(Int8Quantizer, max_error=0.004)))  # 1/2 of 1/127
def test_int8(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(quantizer_checks(Int4Quantizer, max_error=0.07)))  # 1/2 of 2/15
def test_int4(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(quantizer_checks(Int4Quantizer, Int4Config(group_size=16), max_error=0.07)))
def test_int4_small_groups(check: Check) -> None:
    check.run()
