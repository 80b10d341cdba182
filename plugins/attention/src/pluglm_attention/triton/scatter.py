"""Writes new keys and values to their slots, quantised on the way if the storage is."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

# K: kv heads of a program, H: head dim, both padded to powers of two

# A head of zeros would divide 0 by 0 (and its storage would then hold NaN).
_LEAST_SCALE = tl.constexpr(1e-12)
# Adding and taking away 1.5 * 2**23 steps leaves a float32 of less than 2**22 steps rounded to one, ties to even.
_ROUND = tl.constexpr(12582912.0)
_EXPONENT = tl.constexpr(0x7F800000)
# Below this, e4m3 is subnormal and its steps grow no smaller.
_LEAST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def rounded(codes_KH, storage_type: tl.constexpr):
    """The nearest float32 that int8 or e4m3 (steps of 1/8 of a power of two) has, ties to even.

    The device's cast rounds so as well, but that of triton's interpreter halves some values and truncates others.
    """
    steps_KH = tl.full(codes_KH.shape, 1.0, tl.float32)
    if storage_type != tl.int8:
        powers_KH = (codes_KH.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
        steps_KH = tl.maximum(powers_KH, _LEAST_NORMAL) * 0.125
    return (codes_KH + steps_KH * _ROUND) - steps_KH * _ROUND


@triton.jit
def quantised(x_KH, storage_type: tl.constexpr):
    """(codes_KH, scale_K): x is codes * scale, the largest of a head at the end of the code's range.

    A head that holds NaN or infinity has a scale of NaN and codes of 0: maxima and the clamp would hide NaN.
    """
    LIMIT: tl.constexpr = 127.0 if storage_type == tl.int8 else 448.0
    is_sound_K = tl.max((tl.abs(x_KH) < float("inf")).to(tl.int32) ^ 1, 1) == 0
    x_KH = tl.where(is_sound_K[:, None], x_KH, 0.0)
    scale_K = tl.maximum(tl.div_rn(tl.max(tl.abs(x_KH), 1), LIMIT), _LEAST_SCALE)
    codes_KH = tl.div_rn(x_KH, tl.broadcast_to(scale_K[:, None], x_KH.shape))
    codes_KH = tl.minimum(tl.maximum(codes_KH, -LIMIT), LIMIT)  # e4m3 has no infinity: more would become NaN
    scale_K = tl.where(is_sound_K, scale_K, float("nan"))
    return rounded(codes_KH, storage_type).to(storage_type), scale_K


@triton.jit
def store_token(
    x,
    x_token,
    x_head,
    stored,
    stored_slot,
    stored_head,
    scales,
    place,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """place: (token, slot), both int64."""
    token, slot = place
    heads_K = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    columns_H = tl.arange(0, HEAD_PAD)
    inside_KH = (heads_K < HEADS)[:, None] & (columns_H < HEAD_DIM)[None, :]
    x_KH = tl.load(x + token * x_token + heads_K[:, None] * x_head + columns_H[None, :], mask=inside_KH, other=0)
    if scales is None:
        codes_KH = x_KH.to(stored.dtype.element_ty)
    else:
        codes_KH, scale_K = quantised(x_KH.to(tl.float32), stored.dtype.element_ty)
        tl.store(scales + slot * HEADS + heads_K, scale_K, mask=heads_K < HEADS)
    pointers_KH = stored + slot * stored_slot + heads_K[:, None] * stored_head + columns_H[None, :]
    tl.store(pointers_KH, codes_KH, mask=inside_KH)


@triton.jit
def scatter_kernel(
    k,
    v,
    slots,
    keys,
    values,
    k_scales,
    v_scales,
    k_token,
    k_head,
    v_token,
    v_head,
    keys_slot,
    keys_head,
    values_slot,
    values_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (T, blocks of kv heads). k, v [T, K, H] to keys, values [slots, K, H]; a negative slot is skipped.

    k_scales, v_scales float32 [slots, K], contiguous: the storage is int8 or e4m3; None: it has values as they are.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        place = (token, slot)
        store_token(k, k_token, k_head, keys, keys_slot, keys_head, k_scales, place, HEADS, HEAD_DIM, HEAD_PAD, BLOCK_K)
        store_token(
            v, v_token, v_head, values, values_slot, values_head, v_scales, place, HEADS, HEAD_DIM, HEAD_PAD, BLOCK_K
        )
