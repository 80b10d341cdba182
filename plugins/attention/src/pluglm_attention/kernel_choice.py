"""Which kernel computes for an attention plugin: what each needs, the recorded choice, and the config key for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from pydantic import model_validator

from pluglm.kernel.errors import ConfigError, IncompatibleError
from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.kernels import Candidate, KernelChoice, choose
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.native.tools import NativeTools
from pluglm_attention import native_kernel
from pluglm_attention.triton import unavailable
from pluglm_attention.triton.launch_configs import DEFAULT_TABLE, LaunchTable, choose_config, read_table
from pluglm_attention.triton_kernels import why_not_encoded

BY_SHAPE = "torch picks its products by shape, so a row's bits depend on its batch"
BY_SPLITS = "keys are split by batch, so a row's bits depend on it"
NOT_ENCODED = "it reads and writes keys and values in the run's dtype, and the run has a KV format"


class KernelConfig(ComponentConfig):
    """kernel: what computes. `auto` is the first that can run of triton (CUDA), native (CPU) and torch.

    In deterministic runs it is the first of native and tiled (torch's products in tiles of one shape), the only ones
    that keep a row's bits. Any other name is that kernel or no run.
    launch_table: a file that `python -m pluglm_attention.triton.autotune` wrote on such a device, for the kernel
    triton; relative to the working directory. None takes sizes that were chosen from what the compiler reports.
    """

    kernel: Literal["auto", "native", "tiled", "torch", "triton"] = "auto"
    launch_table: Path | None = None

    @model_validator(mode="after")
    def _table_is_used(self) -> Self:
        if self.launch_table is not None and self.kernel not in ("auto", "triton"):
            raise ValueError(
                f"launch_table is for the kernel triton, and kernel is {self.kernel}; leave one of them out"
            )
        return self


class AttentionKernel(Protocol):
    """As Attention.plan and Attention.run."""

    def plan(self, batch: AttentionBatch) -> Any: ...

    def run(
        self, layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: Any, kv: KVStore
    ) -> torch.Tensor: ...


KernelMaker = Callable[[BuildContext, LaunchTable], AttentionKernel]


def why_not_triton(context: BuildContext) -> str | None:
    device = torch.device(context.device)
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if context.deterministic:
        return BY_SPLITS
    if reason := unavailable():
        return reason
    if reason := why_not_encoded(context.kv_format, device):
        return reason
    try:
        for layer in context.spec.layers:
            choose_config(DEFAULT_TABLE, "decode", device, layer.head_dim)
    except ValueError as error:
        return str(error)
    return None


def why_not_native(context: BuildContext) -> str | None:
    if torch.device(context.device).type != "cpu":
        return f"it runs on the CPU, not on {context.device}"
    if not isinstance(context.tools, NativeTools):
        return "the backend does not run native kernels"
    if context.kv_format is not None:
        return NOT_ENCODED
    return native_kernel.refusal(context)


def why_not_torch(context: BuildContext) -> str | None:
    return BY_SHAPE if context.deterministic else None


CANDIDATES = (
    Candidate("triton", why_not_triton),
    Candidate("native", why_not_native),
    Candidate("torch", why_not_torch),
    Candidate("tiled", lambda context: None),
)


def build_kernel(
    plugin: str, config: KernelConfig, context: BuildContext, makers: Mapping[str, KernelMaker]
) -> AttentionKernel:
    """The kernel that the config names, or the first that can run; the choice goes into the context's log.

    makers: one for each of CANDIDATES. IncompatibleError, with the reason, when the named one cannot run, or the one
    that a launch_table is for. ConfigError for a table that is none.
    """
    choice = choose(f"{plugin} attention", _candidates(plugin, config, context), context)
    recorded = choice
    if choice.kernel == "native":
        recorded = KernelChoice(choice.operation, f"native ({context.tools.level})", choice.refused)
    context.kernels.add(recorded)
    return makers[choice.kernel](context, _launch_table(plugin, config, choice))


def _launch_table(plugin: str, config: KernelConfig, choice: KernelChoice) -> LaunchTable:
    if config.launch_table is None:
        return DEFAULT_TABLE
    if choice.kernel != "triton":
        reason = dict(choice.refused)["triton"]
        raise IncompatibleError(f"attention '{plugin}': launch_table is for the kernel triton: {reason}; leave it out")
    try:
        return read_table(config.launch_table)
    except ValueError as error:
        raise ConfigError(f"attention.launch_table: {error}; write it anew, or leave the key out") from error


def _candidates(plugin: str, config: KernelConfig, context: BuildContext) -> tuple[Candidate, ...]:
    if config.kernel == "auto":
        return CANDIDATES
    (named,) = (candidate for candidate in CANDIDATES if candidate.name == config.kernel)
    if reason := named.can_run(context):
        raise IncompatibleError(
            f"attention '{plugin}': kernel '{config.kernel}' cannot run here: {reason}; leave the key kernel out, or "
            f"set attention.kernel: auto"
        )
    return (named,)
