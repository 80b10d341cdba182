"""fp8 KV: e4m3 (Micikevicius et al., 2022, arXiv:2209.05433), four bits of precision at every size of number."""

from __future__ import annotations

import torch

from pluglm.kernel.interfaces.kv_format import SymmetricCodes
from pluglm_quant.kv_symmetric import LEAST_SCALE, SymmetricKV


class Fp8KV(SymmetricKV):
    """Keys and values as float8 e4m3, one scale a token and head.

    Rounding error of a number: at most 1/16 of it, or 2**-10 scales where that is more; the scale is largest |x| / 448.
    e4m3 has no infinity, and what is above 448 becomes NaN in a cast: values are clamped before it.
    """

    codes = SymmetricCodes(value_dtype=torch.float8_e4m3fn, limit=448.0, least_scale=LEAST_SCALE)
