"""What a launch refuses, so that no kernel reads past a tensor or computes something else. Imports no triton."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.triton_kernels.availability import check_dtype
from pluglm_attention.triton.launch_configs import check_storage
from pluglm_attention.triton.plan import KVScales

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim

_COMPUTED = (torch.float16, torch.bfloat16, torch.float32)
_QUANTISED = (torch.int8, torch.float8_e4m3fn)


def check_attention(
    layer: LayerSpec, q_TNH: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, num_tokens: int
) -> None:
    """ValueError unless q is [num_tokens or more, N, H] and keys and values are [*, K, H] of the layer, heads side by
    side in memory, on one device, in a dtype that can be computed here."""
    check_dtype(q_TNH)
    if q_TNH.dtype not in _COMPUTED:
        raise ValueError(f"the Triton attention takes queries of {_COMPUTED}, not {q_TNH.dtype}")
    for name, tensor, heads in (
        ("q", q_TNH, layer.num_heads),
        ("keys", keys, layer.num_kv_heads),
        ("values", values, layer.num_kv_heads),
    ):
        if tensor.dim() != 3 or tensor.shape[1:] != (heads, layer.head_dim) or tensor.stride(2) != 1:
            raise ValueError(
                f"{name} should be [rows, {heads}, {layer.head_dim}] with dense rows of a head, not "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        if tensor.device != q_TNH.device:
            raise ValueError(f"{name} is on {tensor.device}, and q on {q_TNH.device}")
    if q_TNH.shape[0] < num_tokens:
        raise ValueError(f"q has {q_TNH.shape[0]} rows, and the plan is of {num_tokens}")


def check_storage_of(keys: torch.Tensor, values: torch.Tensor, scales: KVScales | None, plain: torch.dtype) -> None:
    """ValueError unless keys and values are alike, in the plain dtype without scales or in int8 or e4m3 with them."""
    if keys.dtype != values.dtype or keys.stride() != values.stride() or keys.shape != values.shape:
        raise ValueError(
            f"keys are {keys.dtype} {tuple(keys.shape)} with strides {keys.stride()} and values {values.dtype} "
            f"{tuple(values.shape)} with strides {values.stride()}: they must be the same"
        )
    if scales is None:
        if keys.dtype != plain:
            raise ValueError(f"keys and values without scales must be {plain}, not {keys.dtype}")
        return
    if keys.dtype not in _QUANTISED:
        raise ValueError(f"keys and values with scales must be of {_QUANTISED}, not {keys.dtype}")
    check_storage(keys.dtype, keys.device)
    for scale_SK in scales:
        if scale_SK.dtype != torch.float32 or scale_SK.shape != keys.shape[:2] or not scale_SK.is_contiguous():
            raise ValueError(
                f"scales should be float32 {tuple(keys.shape[:2])}, contiguous, not {scale_SK.dtype} "
                f"{tuple(scale_SK.shape)} with strides {scale_SK.stride()}"
            )


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
