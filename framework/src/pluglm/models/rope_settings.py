"""Which rotary embedding a configuration asks for, in the old and the new spelling of transformers. No arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pluglm.models.config_reader import ConfigReader

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """One rotary embedding. Positions are counted in tokens, `theta` is the base of the wavelengths.

    original_max_position: the context before scaling (llama3, yarn), or the length from which dynamic scaling acts.
    attention_factor multiplies cosine and sine. factors_tensor: a checkpoint tensor of head_dim / 2 divisors of the
    frequencies (GGUF), or None.
    """

    kind: str
    theta: float
    head_dim: int
    max_position: int  # positions the scaled embedding is meant for
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors_tensor: str | None = None


def read_rope(config: ConfigReader, head_dim: int, max_position: int) -> RopeSettings:
    """The one rotary embedding of a family without layer kinds.

    Reads `rope_theta` + `rope_scaling` (transformers 4, GGUF) or `rope_parameters` (transformers 5), and the kind from
    `rope_type` or `type`; `rope_scaling` wins over `rope_parameters`, as in transformers. Raises CheckpointError.
    """
    key = "rope_scaling" if config.value("rope_scaling") else "rope_parameters"
    table = config.table_or_empty(key)
    for name, value in table.values().items():
        if isinstance(value, Mapping):
            raise table.refuse(name, "is a table of one layer kind, which this family does not have")
    outer = {name: config.value(name) for name in ("rope_theta", "partial_rotary_factor")}
    named = {name: value for name, value in outer.items() if value is not None and table.value(name) is None}
    original = config.value("original_max_position_embeddings")
    if original is not None:
        named["original_max_position_embeddings"] = original
    return read_rope_table(table.merged(named), head_dim, max_position)


def read_rope_table(table: ConfigReader, head_dim: int, max_position: int) -> RopeSettings:
    """Settings from one rope table that holds its own `rope_theta`. Raises CheckpointError naming the key."""
    if head_dim % 2:
        raise table.refuse("head_dim", f"is {head_dim}; rotary embeddings need an even one")
    if table.number("partial_rotary_factor", 1.0) != 1.0:
        raise table.refuse("partial_rotary_factor", "is not 1; this family rotates whole heads")
    kind_key = "rope_type" if table.value("rope_type") is not None else "type"
    kind = table.choice(kind_key, _READERS, "default")
    base: dict[str, Any] = {"kind": kind, "theta": table.number("rope_theta", DEFAULT_THETA), "head_dim": head_dim}
    return RopeSettings(**({"max_position": max_position} | base | _READERS[kind](table, max_position)))


def _read_nothing(table: ConfigReader, max_position: int) -> dict[str, Any]:
    return {}


def _read_linear(table: ConfigReader, max_position: int) -> dict[str, Any]:
    return {"factor": table.number("factor")}


def _read_dynamic(table: ConfigReader, max_position: int) -> dict[str, Any]:
    factor = table.number("factor")
    return {
        "factor": factor,
        "original_max_position": max_position,
        "max_position": max(max_position, int(factor * max_position)),
    }


def _read_llama3(table: ConfigReader, max_position: int) -> dict[str, Any]:
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    if high <= low:
        raise table.refuse("high_freq_factor", f"is {high}; it must be above low_freq_factor, {low}")
    return {
        "factor": table.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position": table.integer("original_max_position_embeddings", max_position),
    }


def _read_yarn(table: ConfigReader, max_position: int) -> dict[str, Any]:
    if table.number("rope_theta", DEFAULT_THETA) <= 1.0:
        raise table.refuse("rope_theta", "must be above 1 for yarn, which divides by its logarithm")
    original = table.integer("original_max_position_embeddings", max_position)
    factor = table.number("factor", max_position / original)
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": _yarn_attention_factor(table, factor),
        "beta_fast": table.number("beta_fast", 32.0),
        "beta_slow": table.number("beta_slow", 1.0),
        "truncate": table.flag("truncate", True),
        "max_position": max(max_position, int(factor * original)),
    }


def _yarn_attention_factor(table: ConfigReader, factor: float) -> float:
    """Peng et al. 2023, https://arxiv.org/abs/2309.00071, equation 22; mscale as DeepSeek-V2 extends it."""
    given = table.optional_number("attention_factor")
    if given is not None:
        return given
    numerator, denominator = table.value("mscale"), table.value("mscale_all_dim")
    if numerator and denominator:
        return _magnitude(factor, table.number("mscale")) / _magnitude(factor, table.number("mscale_all_dim"))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _read_factors(table: ConfigReader, max_position: int) -> dict[str, Any]:
    name = table.value("tensor")
    if not isinstance(name, str):
        raise table.refuse("tensor", f"is {name!r}; the name of the tensor of divisors is needed")
    return {"factors_tensor": name}


_READERS: Mapping[str, Callable[[ConfigReader, int], dict[str, Any]]] = {
    "default": _read_nothing,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "freq_factors": _read_factors,
}
