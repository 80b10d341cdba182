"""The plugin `flash`: tiles of queries over tiles of keys, one sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping

from pluglm.kernel.interfaces.component import BuildContext
from pluglm_attention.kernel_attention import KernelAttention
from pluglm_attention.kernel_choice import AttentionKernel, KernelConfig, KernelMaker, build_kernel
from pluglm_attention.native_kernel import NativeKernel
from pluglm_attention.segment_kernel import SegmentKernel
from pluglm_attention.tiled import tiled_attention
from pluglm_attention.torch_kernels import TorchKernel
from pluglm_attention.triton.launch_configs import LaunchTable
from pluglm_attention.triton_kernels import TritonFlash, TritonPaged, codes_of


def _on_triton(context: BuildContext, table: LaunchTable) -> AttentionKernel:
    codes = codes_of(context.kv_format)
    return TritonFlash(table) if codes is None else TritonPaged(codes, table)


MAKERS: Mapping[str, KernelMaker] = {
    "triton": _on_triton,
    "native": lambda context, _: NativeKernel(context),
    "torch": lambda context, _: TorchKernel.flash(context.kv_format),
    "tiled": lambda context, _: SegmentKernel(tiled_attention, context.kv_format),
}


class FlashAttention(KernelAttention):
    """FlashAttention-2 (Dao, 2023, arXiv:2307.08691) for batches of sequences of any lengths, each behind its cached
    prefix, with grouped heads, windows and soft caps. No matrix of all queries and all keys is ever made.

    On CUDA a Triton kernel reads keys that lie side by side, and gathers others first; keys in a KV format are read by
    that of `paged`, in place. On a CPU the native kernel runs, which is the one of `paged` too. The torch kernel runs
    anywhere, a tile at a time.
    """

    def __init__(self, config: KernelConfig, context: BuildContext) -> None:
        super().__init__(build_kernel("flash", config, context, MAKERS))
