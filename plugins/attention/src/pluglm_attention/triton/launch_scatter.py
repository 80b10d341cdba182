"""Starts the kernel that writes keys and values. Importing it imports triton: ask `unavailable()` first."""

from __future__ import annotations

import torch

from pluglm.triton_kernels.availability import check_dtype
from pluglm_attention.triton.checks import check_storage_of, on_device
from pluglm_attention.triton.plan import KVScales
from pluglm_attention.triton.scatter import scatter_kernel

# T: tokens of the flat batch, K: kv heads, H: head dim

_MOST_VALUES = 2048  # of one program, so that a thread of four warps holds 16


def launch_scatter(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    slots_T: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Writes token t's key and value to row slots_T[t] of keys and values [slots, K, H]; a negative slot is skipped.

    With scales they are quantised to the storage's int8 or e4m3, symmetric, one scale a token and head: the largest
    magnitude is at the end of the range, rounding is to nearest even; a head that holds NaN or infinity has a scale of
    NaN. Slots must differ. ValueError for shapes, dtypes or strides that do not fit.
    """
    _check(k_TKH, v_TKH, slots_T, keys, values)
    check_storage_of(keys, values, scales, k_TKH.dtype)
    num_tokens, heads, head_dim = k_TKH.shape
    if num_tokens == 0:
        return
    head_pad, block_k = scatter_blocks(heads, head_dim)
    with on_device(k_TKH):
        scatter_kernel[num_tokens, -(-heads // block_k)](
            k_TKH,
            v_TKH,
            slots_T,
            keys,
            values,
            *((None, None) if scales is None else scales),
            *(stride for tensor in (k_TKH, v_TKH, keys, values) for stride in tensor.stride()[:2]),
            HEADS=heads,
            HEAD_DIM=head_dim,
            HEAD_PAD=head_pad,
            BLOCK_K=block_k,
            num_warps=4,
        )


def scatter_blocks(num_heads: int, head_dim: int) -> tuple[int, int]:
    """(padded head dim, kv heads of a program), both powers of two."""
    head_pad = 1 << (head_dim - 1).bit_length()
    return head_pad, min(1 << (num_heads - 1).bit_length(), max(1, _MOST_VALUES // head_pad))


def _check(
    k_TKH: torch.Tensor, v_TKH: torch.Tensor, slots_T: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    check_dtype(k_TKH, v_TKH)
    if k_TKH.shape != v_TKH.shape or k_TKH.dtype != v_TKH.dtype:
        raise ValueError(f"k is {k_TKH.dtype} {tuple(k_TKH.shape)}, and v {v_TKH.dtype} {tuple(v_TKH.shape)}")
    if slots_T.dtype != torch.int64 or slots_T.shape != k_TKH.shape[:1] or not slots_T.is_contiguous():
        raise ValueError(f"slots should be int64 [{k_TKH.shape[0]}], not {slots_T.dtype} {tuple(slots_T.shape)}")
    for tensor in (keys, values):
        if tensor.dim() != 3 or tensor.shape[1:] != k_TKH.shape[1:]:
            raise ValueError(f"storage {tuple(tensor.shape)} does not hold rows of {tuple(k_TKH.shape[1:])}")
    for tensor in (k_TKH, v_TKH, keys, values):
        if tensor.stride(2) != 1:
            raise ValueError(f"strides {tensor.stride()}: the values of a head must lie side by side")
        if tensor.device != slots_T.device:
            raise ValueError(f"slots are on {slots_T.device}, and keys or values on {tensor.device}")
