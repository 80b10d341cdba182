"""The choice of kernels on a CPU: native ones where they can be built, else those of torch. Knows why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pluglm.backends.linear import DenseLinear, PackedLinear, can_pack
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.kernels import Candidate, KernelLog, choose
from pluglm.native.build import NativeBuildError
from pluglm.native.fuser import NativeFuser
from pluglm.native.tools import DTYPES, NativeTools

if TYPE_CHECKING:
    from pluglm.backends.cpu import CpuConfig
    from pluglm.kernel.interfaces.model import Fuser, Linear, LinearFactory


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """What a run computes with. tools and fuser: None without native kernels."""

    make_linear: LinearFactory
    fuser: Fuser | None
    tools: NativeTools | None


def choose_kernels(
    config: CpuConfig, dtype: torch.dtype, num_threads: int, deterministic: bool, log: KernelLog
) -> CpuKernels:
    """Choices go into `log` as layers are made. PluginError, with the reason, for what the config asks in vain."""
    tools, reason = _open_tools(config, dtype, num_threads)
    if reason is not None and (config.kernels == "native" or config.isa != "auto"):
        wanted = "kernels: native" if config.kernels == "native" else f"isa: {config.isa}"
        hint = "leave out backend.isa and set backend.kernels: auto or torch"
        raise PluginError(f"backend 'cpu': {wanted} cannot be had here: {reason}; {hint}")
    if tools is not None:
        fuser = NativeFuser(tools, log, deterministic=deterministic)
        return CpuKernels(fuser.make_linear, fuser, tools)
    candidates = [
        Candidate("native", lambda _: reason),
        Candidate("onednn packed", lambda _: _why_not_packed(config, dtype)),
        Candidate("torch", lambda _: None),
    ]
    choice = choose("linear", candidates, None)

    def make_linear(name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Linear:
        log.add(choice)  # not before: a quantizer may make all layers
        return (PackedLinear if choice.kernel == "onednn packed" else DenseLinear)(name, weight_NK, bias_N)

    return CpuKernels(make_linear, None, None)


def _why_not_packed(config: CpuConfig, dtype: torch.dtype) -> str | None:
    if config.compile:
        return "torch.compile takes plain weights"
    return None if can_pack(dtype) else f"oneDNN does not pack {dtype} on this CPU"


def _open_tools(config: CpuConfig, dtype: torch.dtype, num_threads: int) -> tuple[NativeTools | None, str | None]:
    if config.kernels == "torch":
        return None, "the config says kernels: torch"
    if dtype not in DTYPES:
        return None, f"there are none for {str(dtype).removeprefix('torch.')}"
    try:
        return NativeTools(num_threads, config.isa, config.spin_us), None
    except NativeBuildError as error:
        return None, str(error)
