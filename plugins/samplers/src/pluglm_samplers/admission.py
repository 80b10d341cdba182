"""Which sampling parameters a sampler could not honour: they are refused at admission instead of being ignored."""

from __future__ import annotations

from collections.abc import Collection

from pluglm.kernel.sampling_params import SamplingParams

# what decides the argmax, and what shapes the draw: without effect on a greedy request, by definition
BEFORE_ARGMAX = (
    "allowed_token_ids", "bad_words_ids", "min_tokens", "logit_bias",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier",
)  # fmt: skip
SHAPING = (
    "temperature", "dynatemp_high", "top_n_sigma", "top_k", "top_p", "min_p", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "xtc_probability", "mirostat",
)  # fmt: skip


def unsupported(params: SamplingParams, supported: Collection[str]) -> str | None:
    """Names the first parameter that params set away from neutral and that is not in `supported`; None if all are."""
    for name in BEFORE_ARGMAX if params.greedy else BEFORE_ARGMAX + SHAPING:
        value = getattr(params, name)
        if name not in supported and value != _neutral(name) and not (name == "top_k" and value < 1):
            return f"{name}={value!r}"
    return None


def _neutral(name: str) -> object:
    """The kernel's defaults are the values that switch a parameter off."""
    return SamplingParams.model_fields[name].default
