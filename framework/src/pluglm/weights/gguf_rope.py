"""Rotary-embedding settings of a GGUF file as a Hugging Face `rope_scaling` table. Reads metadata, no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pluglm.weights.gguf_keys import Keys

FACTORS_TENSOR = "rope_freqs.weight"
_LOW, _HIGH = 1.0, 4.0
_ORIGINAL_CONTEXTS = tuple(1024 << power for power in range(8))
_TOLERANCE = 1e-4


def rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """The table for linear and yarn scaling, None for none; another type is passed on by name for the model to refuse.

    yarn: Peng et al. 2023, https://arxiv.org/abs/2309.00071. GGUF's attn_factor multiplies the method's own
    1 + 0.1 ln(factor), where Hugging Face's attention_factor replaces it.
    """
    kind = keys.text("rope.scaling.type")
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    if kind == "none" or (kind in (None, "linear") and factor == 1.0):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    return _yarn(keys, factor)


def _yarn(keys: Keys, factor: float) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = keys.integer("rope.scaling.original_context_length")
    if original is not None:
        table["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        value = keys.number(f"rope.scaling.yarn_{name}")
        if value is not None:
            table[name] = value
    attention_factor = keys.number("rope.scaling.attn_factor")
    if attention_factor not in (None, 1.0):
        table["attention_factor"] = attention_factor * (1.0 + 0.1 * math.log(factor))
    return table


def scaling_of_factors(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """The `llama3` table whose frequency divisors are `factors` (one for each pair of a head), else a named tensor.

    The converter of Llama 3.1 and later writes only the divisors. They follow from four numbers, of which every
    release has low_freq_factor 1 and high_freq_factor 4; the other two are recovered and checked against each
    divisor, to 1e-4. Divisors that fit no such table give {"rope_type": "freq_factors", "tensor": ...}: the model is
    to divide its inverse frequencies by that tensor. All ones give None.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    largest = float(f"{max(factors):.6g}")
    for original in _ORIGINAL_CONTEXTS:
        expected = _llama3_factors(len(factors), theta, largest, original)
        if all(abs(got - want) <= _TOLERANCE * want for got, want in zip(factors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }
    return {"rope_type": "freq_factors", "tensor": FACTORS_TENSOR}


def _llama3_factors(num_pairs: int, theta: float, factor: float, original: int) -> list[float]:
    divisors = []
    for pair in range(num_pairs):
        wavelength = 2 * math.pi * theta ** (pair / num_pairs)
        blend = min(max((original / wavelength - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - blend) / factor + blend))
    return divisors
