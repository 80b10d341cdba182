"""int8 KV: 127 steps to each side of zero for every key and value of a token and head."""

from __future__ import annotations

import torch

from pluglm.kernel.interfaces.kv_format import SymmetricCodes
from pluglm_quant.kv_symmetric import LEAST_SCALE, SymmetricKV


class Int8KV(SymmetricKV):
    """Keys and values as int8, symmetric, one scale a token and head.

    Rounding error of a number: at most half its row's scale, largest |x| / 127, wherever in the row it lies. Runs on
    every device.
    """

    codes = SymmetricCodes(value_dtype=torch.int8, limit=127.0, least_scale=LEAST_SCALE)
