"""Which kernel flash and paged run on: the recorded choice, and refusals with their reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_tools import native_tools

from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, DETERMINISTIC, KV_FORMATS, BuildContext, ComponentConfig
from pluglm.kernel.interfaces.kernels import KernelChoice
from pluglm.testing.context import make_context
from pluglm.testing.kv_formats import NibbleKV
from pluglm_attention.flash import FlashAttention
from pluglm_attention.kernel_choice import KernelConfig
from pluglm_attention.paged import PagedAttention
from pluglm_attention.triton_kernels import CODES, why_not_encoded

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
    assert BATCH_INVARIANT in cls.capabilities(KernelConfig(kernel=kernel)).provides


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


NIBBLES = NibbleKV(ComponentConfig(), "cpu", torch.float32)


@pytest.mark.parametrize("cls", [FlashAttention, PagedAttention])
def test_all_kernels_but_the_native_one_read_kv_formats(cls: type[Any]) -> None:
    for kernel in ("auto", "tiled", "torch", "triton"):
        declared = cls.capabilities(KernelConfig(kernel=kernel))  # type: ignore[arg-type]
        assert KV_FORMATS in declared.provides
        assert "slot:kv_format" not in declared.refuses
    native = cls.capabilities(KernelConfig(kernel="native"))
    assert KV_FORMATS not in native.provides
    assert "the run has a KV format; set attention.kernel: auto" in native.refuses["slot:kv_format"]


@pytest.mark.parametrize("cls", [FlashAttention, PagedAttention])
def test_in_a_kv_format_torch_computes_and_the_log_says_why(cls: type[Any]) -> None:
    for deterministic, kernel in ((False, "torch"), (True, "tiled")):
        (choice,) = choices(cls, "auto", tools=native_tools(), kv_format=NIBBLES, deterministic=deterministic)
        assert choice.kernel == kernel
        assert "the run has a KV format" in dict(choice.refused)["native"]


class Declares(NibbleKV):
    """Codes of some arithmetic."""

    def __init__(self, codes: Any) -> None:
        self.codes = codes

    def symmetric(self) -> Any:
        return self.codes


def test_triton_takes_the_codes_that_it_writes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert why_not_encoded(None, cuda) is None
    assert "has other ones" in str(why_not_encoded(NIBBLES, cuda))
    assert "has other ones" in str(why_not_encoded(Declares(dataclasses.replace(CODES[0], limit=126.0)), cuda))
    assert [why_not_encoded(Declares(one), cuda) for one in CODES] == [
        None,
        "cuda has compute capability 8.0, and e4m3 needs 8.9: store int8 instead",
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert [why_not_encoded(Declares(one), cuda) for one in CODES] == [None, None]
