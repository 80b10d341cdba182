"""Which kernel flash and paged run on: the recorded choice, and refusals with their reasons."""

from __future__ import annotations

from typing import Any

import pytest
from attention_tools import native_tools

from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, DETERMINISTIC, BuildContext
from pluglm.kernel.interfaces.kernels import KernelChoice
from pluglm.testing.context import make_context
from pluglm_attention.flash import FlashAttention
from pluglm_attention.kernel_choice import KernelConfig
from pluglm_attention.paged import PagedAttention

PLUGINS = [(FlashAttention, "flash"), (PagedAttention, "paged")]
NO_CUDA = ("triton", "it runs on CUDA devices, not on cpu")
NO_TOOLS = ("native", "the backend does not run native kernels")


def choices(cls: type[Any], kernel: Any, **context: Any) -> list[KernelChoice]:
    built: BuildContext = make_context(**context)
    cls(KernelConfig(kernel=kernel), built)
    return built.kernels.choices


@pytest.mark.parametrize(("cls", "name"), PLUGINS)
def test_without_native_kernels_auto_is_torch(cls: type[Any], name: str) -> None:
    assert choices(cls, "auto") == [KernelChoice(f"{name} attention", "torch", (NO_CUDA, NO_TOOLS))]


@pytest.mark.parametrize(("cls", "name"), PLUGINS)
def test_a_deterministic_run_without_native_kernels_is_tiled(cls: type[Any], name: str) -> None:
    (choice,) = choices(cls, "auto", deterministic=True)
    assert choice.kernel == "tiled"
    assert [kernel for kernel, _ in choice.refused] == ["triton", "native", "torch"]
    assert "a row's bits depend on its batch" in dict(choice.refused)["torch"]


@pytest.mark.parametrize(("cls", "name"), PLUGINS)
@pytest.mark.parametrize("kernel", ["torch", "tiled"])
def test_a_named_kernel_is_used(cls: type[Any], name: str, kernel: str) -> None:
    assert choices(cls, kernel) == [KernelChoice(f"{name} attention", kernel)]


@pytest.mark.parametrize(("cls", "name"), PLUGINS)
@pytest.mark.parametrize(("kernel", "reason"), [NO_CUDA, NO_TOOLS])
def test_a_named_kernel_that_cannot_run_is_refused(cls: type[Any], name: str, kernel: str, reason: str) -> None:
    with pytest.raises(IncompatibleError, match=f"attention '{name}': kernel '{kernel}' cannot run here: {reason}"):
        choices(cls, kernel)


@pytest.mark.parametrize("cls", [FlashAttention, PagedAttention])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_kernels_whose_bits_depend_on_the_batch_say_so(cls: type[Any], kernel: Any) -> None:
    declared = cls.capabilities(KernelConfig(kernel=kernel))
    assert "attention.kernel: auto" in declared.refuses[DETERMINISTIC]
    assert BATCH_INVARIANT not in declared.provides


@pytest.mark.parametrize("cls", [FlashAttention, PagedAttention])
@pytest.mark.parametrize("kernel", ["auto", "native", "tiled"])
def test_the_others_promise_not_to_depend_on_it(cls: type[Any], kernel: Any) -> None:
    assert cls.capabilities(KernelConfig(kernel=kernel)).provides == {BATCH_INVARIANT}


@pytest.mark.parametrize(("cls", "name"), PLUGINS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_native_kernels_are_taken_in_float32(cls: type[Any], name: str, deterministic: bool) -> None:
    tools = native_tools()
    found = choices(cls, "auto", tools=tools, deterministic=deterministic)
    assert found == [KernelChoice(f"{name} attention", f"native ({tools.level})", (NO_CUDA,))]


@pytest.mark.parametrize("cls", [FlashAttention, PagedAttention])
def test_native_kernels_are_passed_over_where_they_cannot_run(cls: type[Any]) -> None:
    (half,) = choices(cls, "auto", tools=native_tools(), dtype="float16")
    assert half.kernel == "torch"
    assert dict(half.refused)["native"] == "the dtype is torch.float16"
    (rounded,) = choices(cls, "auto", tools=native_tools(), dtype="bfloat16", deterministic=True)
    assert rounded.kernel == "tiled"
    assert "in bfloat16" in dict(rounded.refused)["native"]


def test_tools_of_another_kind_are_not_used() -> None:
    (choice,) = choices(PagedAttention, "auto", tools=object())
    assert choice.kernel == "torch"


def test_only_the_triton_kernel_has_plans_for_graphs() -> None:
    assert not hasattr(PagedAttention(KernelConfig(kernel="torch"), make_context()), "static_plan")
