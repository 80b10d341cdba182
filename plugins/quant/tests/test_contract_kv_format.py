"""The contract kit of KV formats on int8 and fp8."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.kv_format import kv_format_checks
from pluglm_quant.kv_fp8 import Fp8KV
from pluglm_quant.kv_int8 import Int8KV


@pytest.mark.parametrize("check", **cases(kv_format_checks(Int8KV, max_error=0.00394)))  # 1/2 of 1/127
def test_int8(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(kv_format_checks(Fp8KV, max_error=0.0626)))  # 1/16
def test_fp8(check: Check) -> None:
    check.run()
