"""What the checks of a logits step work on: the step, rows that differ in all that a step may read, random logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams

# R: rows, V: vocabulary

VOCAB_SIZE = 17
INF = float("inf")
# a value away from neutral for every parameter that shapes logits, and another one for the rows beside it
ACTIVE: dict[str, Any] = {
    "temperature": 0.6,
    "dynatemp_low": 0.5,
    "dynatemp_high": 1.5,
    "dynatemp_exponent": 2.0,
    "top_k": 4,
    "top_p": 0.6,
    "min_p": 0.2,
    "typical_p": 0.5,
    "top_n_sigma": 0.8,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.2,
    "xtc_probability": 0.7,
    "xtc_threshold": 0.15,
    "mirostat": 2,
    "mirostat_tau": 1.0,
    "mirostat_eta": 0.3,
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.8,
    "presence_penalty": 0.9,
    "dry_multiplier": 0.7,
    "dry_base": 1.5,
    "dry_allowed_length": 1,
    "dry_breaker_ids": (6,),
    "logit_bias": {2: 1.5, 8: -3.0},
    "allowed_token_ids": (1, 3, 4, 5, 8, 13),
    "bad_words_ids": ((2,), (13, 7), (3, 1, 4)),
    "min_tokens": 5,
    "stop_token_ids": (4, 11),
}
OTHER: dict[str, Any] = {
    **{name: value * 0.5 for name, value in ACTIVE.items() if isinstance(value, float)},
    "dynatemp_high": 0.6,
    "repetition_penalty": 0.8,
    "dry_base": 2.5,
    "top_k": 9,
    "mirostat": 1,
    "dry_allowed_length": 2,
    "dry_breaker_ids": (),
    "logit_bias": {0: -0.5},
    "allowed_token_ids": (0, 2, 3, 16),
    "bad_words_ids": ((9,),),
    "min_tokens": 2,
    "stop_token_ids": (7,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The class under test, and params for which it must be active."""

    cls: type[Any]
    config: Any
    active: SamplingParams

    def build(self) -> LogitsStep:
        step: LogitsStep = self.cls(self.config, VOCAB_SIZE)
        return step

    def row(self, number: int = 0, **changes: Any) -> SampleRow:
        """Rows differ in what they have seen, so that a mix-up of rows shows; the longer ones repeat themselves."""
        output = [(number * 5 + i * i) % VOCAB_SIZE for i in range(1 + 3 * (number % 5))]
        row = SampleRow(
            params=self.active,
            prompt_token_ids=(number % VOCAB_SIZE, 3),
            output_token_ids=output,
            seed=number,
            lane=0,
            position=len(output),
        )
        return replace(row, **changes)

    def rows(self, count: int) -> list[SampleRow]:
        return [self.row(number) for number in range(count)]

    def other(self) -> SamplingParams | None:
        """Other values of the step's own parameters, with which it is active; None if the kit knows none of them."""
        known = {name: OTHER[name] for name in self.cls.parameters if name in OTHER}
        other = self.active.model_copy(update=known)
        return other if known and self.build().is_active(other) else None


def apply(step: LogitsStep, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The step's result on a copy, as the step may work in place."""
    with torch.inference_mode():
        return step.apply(logits_RV.clone(), rows).clone()


def random_rows(count: int, seed: int = 0) -> torch.Tensor:
    """logits_RV float32 without ties."""
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2
