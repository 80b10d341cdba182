"""Inverse frequencies of each kind of rotary embedding, in float32 and in the order of operations of transformers."""

from __future__ import annotations

import math

import torch

from pluglm.models.rope_settings import RopeSettings

# F: rotary pairs, half the head dim; frequencies in radians per token


def inverse_frequencies(rope: RopeSettings, divisors_F: torch.Tensor | None = None) -> torch.Tensor:
    """frequencies_F, float32 on the CPU: theta^(-2i/d), scaled as the kind asks, then divided by `divisors_F`.

    Sources: RoPE, https://arxiv.org/abs/2104.09864; linear, https://arxiv.org/abs/2306.15595; yarn,
    https://arxiv.org/abs/2309.00071; llama3, the Llama 3.1 model card. `dynamic` gives the unscaled frequencies.
    """
    wavelengths_F = rope.theta ** (torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim)
    frequencies_F = 1.0 / wavelengths_F
    if rope.kind == "linear":
        frequencies_F = frequencies_F / rope.factor
    elif rope.kind == "llama3":
        frequencies_F = _llama3(rope, frequencies_F)
    elif rope.kind == "yarn":
        frequencies_F = _yarn(rope, wavelengths_F)
    return frequencies_F if divisors_F is None else frequencies_F / divisors_F.to("cpu", torch.float32)


def _llama3(rope: RopeSettings, frequencies_F: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    wavelengths_F = 2 * math.pi / frequencies_F
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    blend_F = (rope.original_max_position / wavelengths_F - rope.low_freq_factor) / span
    blended_F = (1 - blend_F) * frequencies_F / rope.factor + blend_F * frequencies_F
    stretched_F = torch.where(wavelengths_F > longest, frequencies_F / rope.factor, blended_F)
    return torch.where(wavelengths_F < shortest, frequencies_F, stretched_F)


def _yarn(rope: RopeSettings, wavelengths_F: torch.Tensor) -> torch.Tensor:
    """Pairs that turn often keep their frequency, pairs that turn rarely are stretched, a ramp lies between."""
    low, high = _yarn_pair(rope, rope.beta_fast), _yarn_pair(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    # An empty ramp would divide by zero.
    width = high - low if high != low else 0.001
    pairs_F = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    kept_F = 1 - ((pairs_F - low) / width).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths_F) * (1 - kept_F) + 1.0 / wavelengths_F * kept_F


def _yarn_pair(rope: RopeSettings, turns: float) -> float:
    """The (fractional) index of the pair that makes `turns` turns over the original context."""
    return (rope.head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))
