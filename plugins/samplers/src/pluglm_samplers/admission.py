"""Which sampling parameters a sampler could not honour: they are refused at admission instead of being ignored."""

from __future__ import annotations

from collections.abc import Collection

from pluglm.kernel.sampling_params import SamplingParams

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
SHAPING = ("temperature", "top_k", "top_p", "min_p")  # without effect on a greedy request, by definition


def unsupported(params: SamplingParams, supported: Collection[str]) -> str | None:
    """Names the first parameter that params set away from neutral and that is not in `supported`; None if all are."""
    for name in PENALTIES if params.greedy else PENALTIES + SHAPING:
        value = getattr(params, name)
        if name not in supported and value != _neutral(name) and not (name == "top_k" and value < 1):
            return f"{name}={value!r}"
    return None


def _neutral(name: str) -> object:
    """The kernel's defaults are the values that switch a parameter off."""
    return SamplingParams.model_fields[name].default
