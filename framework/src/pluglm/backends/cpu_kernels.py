"""The choice of kernels on a CPU: native ones where they can be built, else those of torch. Knows why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pluglm.backends.linear import DenseLinear, PackedLinear, can_pack
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.kernels import Candidate, KernelChoice, KernelLog, choose
from pluglm.native.build import NativeBuildError
from pluglm.native.fuser import NativeFuser
from pluglm.native.tools import DTYPES, NativeTools

if TYPE_CHECKING:
    from pluglm.backends.cpu import CpuConfig
    from pluglm.kernel.interfaces.model import Fuser, LinearFactory


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """What a run computes with. tools and fuser: None without native kernels."""

    make_linear: LinearFactory
    fuser: Fuser | None
    tools: NativeTools | None


def choose_kernels(
    config: CpuConfig, dtype: torch.dtype, num_threads: int, deterministic: bool, log: KernelLog
) -> CpuKernels:
    """Records the choice in `log`. PluginError, with the reason, when the config insists on what cannot run here."""
    tools, reason = _open_tools(config, dtype, num_threads)
    if reason is not None and config.kernels == "native":
        raise PluginError(f"backend 'cpu': no native kernels here: {reason}; set backend.kernels: auto or torch")
    candidates = [
        Candidate("native", lambda _: reason),
        Candidate("onednn packed", lambda _: None if can_pack(dtype) else f"oneDNN does not pack {dtype} on this CPU"),
        Candidate("torch", lambda _: None),
    ]
    choice = choose("linear", candidates, None)
    if tools is None:
        log.add(choice)
        return CpuKernels(PackedLinear if choice.kernel == "onednn packed" else DenseLinear, None, None)
    passed_over = tuple((f"native ({level})", why) for level, why in tools.refused)
    log.add(KernelChoice("linear", f"native ({tools.level})", passed_over))
    fuser = NativeFuser(tools, log, deterministic=deterministic)
    return CpuKernels(fuser.make_linear, fuser, tools)


def _open_tools(config: CpuConfig, dtype: torch.dtype, num_threads: int) -> tuple[NativeTools | None, str | None]:
    if config.kernels == "torch":
        return None, "the config says kernels: torch"
    if dtype not in DTYPES:
        return None, f"there are none for {str(dtype).removeprefix('torch.')}"
    try:
        return NativeTools(num_threads, config.isa, config.spin_us), None
    except NativeBuildError as error:
        return None, str(error)
