"""The KV managers of the framework against the contract kit."""

from __future__ import annotations

import pytest

from pluglm.kv.contiguous import ContiguousKV
from pluglm.kv.paged import PagedKV
from pluglm.testing.check import Check, cases
from pluglm.testing.kv import kv_checks


@pytest.mark.parametrize("check", **cases(kv_checks(PagedKV)))
def test_paged(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(kv_checks(PagedKV, PagedKV.Config(block_size=1))))
def test_paged_with_blocks_of_one_token(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(kv_checks(ContiguousKV)))
def test_contiguous(check: Check) -> None:
    check.run()
