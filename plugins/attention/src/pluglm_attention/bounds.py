"""The numeric classes of this package: how far from the exact result a value may be.

A bound is the largest absolute error against a float64 evaluation of the contract's formula on the same stored numbers,
for queries, keys and values of unit variance and the usual scale of H**-0.5, at any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Sums of a few hundred rounded products and an exp of them, in float32.
_FLOAT32 = 2e-5

# float32 throughout, and the result rounded once to the run's dtype. Values of unit variance stay below 8, where the
# spacing of bfloat16 is 2**-5 and that of float16 2**-8; rounding to nearest errs by half of it.
ROUNDED_RESULT: Mapping[str, float] = MappingProxyType(
    {"float32": _FLOAT32, "bfloat16": 2**-6 + _FLOAT32, "float16": 2**-9 + _FLOAT32}
)

# The weights of the keys are rounded to the run's dtype as well, for a product on tensor cores or their like: as large
# an error again at most, as they sum to 1.
ROUNDED_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"float32": _FLOAT32, "bfloat16": 2**-5 + _FLOAT32, "float16": 2**-8 + _FLOAT32}
)
