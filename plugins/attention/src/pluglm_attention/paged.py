"""The plugin `paged`: keys through block tables, in one pass for sequences that decode, verify drafts or prefill."""

from __future__ import annotations

from collections.abc import Mapping

from pluglm.kernel.interfaces.component import BuildContext
from pluglm_attention.kernel_attention import KernelAttention
from pluglm_attention.kernel_choice import KernelConfig, KernelMaker, build_kernel
from pluglm_attention.native_kernel import NativeKernel
from pluglm_attention.segment_kernel import SegmentKernel
from pluglm_attention.tiled import tiled_attention
from pluglm_attention.torch_kernels import TorchKernel
from pluglm_attention.triton_kernels import TritonPaged, codes_of

MAKERS: Mapping[str, KernelMaker] = {
    "triton": lambda context, table: TritonPaged(codes_of(context.kv_format), table),
    "native": lambda context, _: NativeKernel(context),
    "torch": lambda context, _: TorchKernel.paged(context.kv_format),
    "tiled": lambda context, _: SegmentKernel(tiled_attention, context.kv_format),
}


class PagedAttention(KernelAttention):
    """PagedAttention (Kwon et al., 2023, arXiv:2309.06180) for mixed batches, with grouped heads, windows, soft caps.
    Few long sequences are split along their keys, as in Flash-Decoding (Dao et al., 2023).

    On CUDA a Triton kernel, on a CPU the native one reads blocks in place. The torch kernel runs anywhere: it gathers
    the keys of all sequences with few new tokens in pieces that are computed together, and tiles the others. Keys in a
    KV format are decoded inside the Triton kernel, and by the piece or tile elsewhere.
    """

    def __init__(self, config: KernelConfig, context: BuildContext) -> None:
        kernel = build_kernel("paged", config, context, MAKERS)
        super().__init__(kernel)
        if isinstance(kernel, TritonPaged):  # the other kernels have no plans for graphs, and must not seem to
            self.static_plan, self.refill = kernel.static_plan, kernel.refill
