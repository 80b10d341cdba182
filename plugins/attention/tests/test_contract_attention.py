"""The contract kit of attention on every implementation of this package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from attention_tools import native_tools

from pluglm.testing.attention import attention_checks
from pluglm.testing.check import Check, cases, run_checks
from pluglm_attention.flash import FlashAttention
from pluglm_attention.kernel_choice import KernelConfig
from pluglm_attention.naive import NaiveAttention
from pluglm_attention.paged import PagedAttention
from pluglm_attention.sdpa import SdpaAttention


@pytest.mark.parametrize("check", **cases(attention_checks(NaiveAttention)))
def test_naive(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(attention_checks(SdpaAttention)))
def test_sdpa(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("kernel", ["auto", "tiled", "torch"])
@pytest.mark.parametrize("cls", [FlashAttention, PagedAttention])
def test_flash_and_paged(cls: type[Any], kernel: Any) -> None:
    report = run_checks(attention_checks(cls, KernelConfig(kernel=kernel)))
    assert report.ok, str(report)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("cls", [FlashAttention, PagedAttention])
def test_flash_and_paged_on_native_kernels(cls: type[Any], num_threads: int) -> None:
    tools = native_tools(num_threads)

    class WithTools(cls):  # type: ignore[misc]
        def __init__(self, config: Any, context: Any) -> None:
            super().__init__(config, replace(context, tools=tools))

    report = run_checks(attention_checks(WithTools, KernelConfig(kernel="native")))
    assert report.ok, str(report)
