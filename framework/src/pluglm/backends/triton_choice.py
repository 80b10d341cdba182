"""The choice of what computes decoder layers and heads on a GPU: Triton's row kernels where they run, else torch."""

from __future__ import annotations

from typing import Literal

import torch

from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.kernels import KernelChoice, KernelLog
from pluglm.triton_kernels.availability import unavailable
from pluglm.triton_kernels.fuser import KERNEL, TritonFuser
from pluglm.triton_kernels.gather import gather_rows

KernelName = Literal["auto", "triton", "torch"]


def choose_fuser(kernels: KernelName, device: str, log: KernelLog) -> TritonFuser | None:
    """None, with the reason in `log`, where torch is to compute. PluginError when `triton` is asked for in vain."""
    reason = "the config says kernels: torch" if kernels == "torch" else why_not_triton(device)
    if reason is None:
        return TritonFuser(device, log)
    if kernels == "triton":
        raise PluginError(
            f"backend 'cuda': kernels: triton cannot be had here: {reason}; set backend.kernels: auto or torch"
        )
    for operation in ("decoder layer", "head"):
        log.add(KernelChoice(operation, "torch", ((KERNEL, reason),)))
    return None


def why_not_triton(device: str) -> str | None:
    """Why no kernel can be launched on the device, or None. Launches one: triton needs a C compiler for the first."""
    if reason := unavailable():
        return reason
    try:
        gather_rows(torch.zeros(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device))
    except Exception as error:  # of triton, of the tools it calls or of the driver: in any case torch computes
        lines = str(error).strip().splitlines() or [""]
        return f"a first launch failed: {type(error).__name__}: {lines[0]}"
    return None
