"""Named orders of the logits steps: those of other engines, so that a request means what it means there."""

from __future__ import annotations

from typing import Literal

Preset = Literal["default", "vllm", "llama.cpp", "joint"]

_MASKS = ("allowed_tokens", "bad_words", "min_tokens")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_HEAT = ("temperature", "dynamic_temperature")
_CUTOFFS = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "xtc", "mirostat")
_BEFORE = (*_MASKS, "logit_bias", *_PENALTIES, "dry", *_HEAT, "top_n_sigma")

# vllm: its V1 sampler, min_p before top_k and top_p. llama.cpp: its default sampler chain, temperature last. joint:
# top_k and top_p both of the same row, as in fused kernels. A step that the engine lacks is left out, save the masks.
PRESETS: dict[Preset, tuple[str, ...]] = {
    "default": (*_BEFORE, "top_k", "top_p", *_CUTOFFS),
    "vllm": (*_MASKS, "logit_bias", *_PENALTIES, "temperature", "min_p", "top_k", "top_p"),
    "llama.cpp": (
        *_MASKS, "logit_bias", *_PENALTIES, "dry",
        "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", *_HEAT, "mirostat",
    ),
    "joint": (*_BEFORE, "top_k_top_p", *_CUTOFFS),
}  # fmt: skip
