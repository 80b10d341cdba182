"""The sampler: logits steps in a configured order, then argmax or one keyed draw. Knows no step by its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidatorFunctionWrapHandler, field_validator

from pluglm.kernel.config import Slot
from pluglm.kernel.core import SampleRow
from pluglm.kernel.errors import ComponentFailure, describe
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep, Sampler
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.admission import unsupported
from pluglm_samplers.drawing import draw, pick_best

# R: rows, V: vocabulary

DEFAULT_STEPS = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "top_k", "top_p", "min_p",
)  # fmt: skip


class ChainConfig(ComponentConfig):
    """steps: applied in this order, each a name or {use: NAME, ...the step's own keys}.

    [] draws from the raw logits.
    """

    steps: tuple[Slot, ...] = tuple(Slot(use=name) for name in DEFAULT_STEPS)

    @field_validator("steps", mode="wrap", json_schema_input_type=list[str | Slot])
    @classmethod
    def _distinct(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> tuple[Slot, ...]:
        steps: tuple[Slot, ...] = validate(value)
        names = [step.use for step in steps]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"steps name {', '.join(repeated)} more than once; a step runs once a draw")
        return steps


class ChainSampler(Sampler):
    """Logits steps in a configured order, then argmax or one keyed draw.

    Each step transforms the rows it is active for in one batched call; what a row gets depends on that row alone.

    Greedy rows skip argmax-invariant steps and everything from the step that reads `temperature` on (in the limit of
    temperature 0 no later step can change the best token), take the argmax, and draw no random number.
    """

    interface_version = 1
    Config = ChainConfig

    def __init__(self, config: ChainConfig, context: BuildContext) -> None:
        self._names = [use.use for use in config.steps]
        self._steps: list[LogitsStep] = []
        for use in config.steps:
            step_class, step_config = context.resolve_component("logits_step", use.use, use.options)
            self._steps.append(step_class(step_config, context.spec.vocab_size))
        self._parameters = frozenset(name for step in self._steps for name in step.parameters)

    @classmethod
    def uses(cls, config: ChainConfig) -> list[tuple[str, str, Mapping[str, Any]]]:
        return [("logits_step", use.use, use.options) for use in config.steps]

    def check(self, params: SamplingParams) -> str | None:
        """Names a parameter for which no step is configured: it would be accepted and ignored."""
        wanted = unsupported(params, self._parameters)
        have = ", ".join(self._names) or "none"
        return f"{wanted} needs a logits step that is not in sampler.steps (configured: {have})" if wanted else None

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """See the contract. ComponentFailure names a step that broke its own; ValueError a row left without a token."""
        for name, step, active in self._active_rows(rows):
            logits_RV = _apply(name, step, logits_RV, rows, active)
        greedy = [index for index, row in enumerate(rows) if row.params.greedy]
        sampled = [index for index, row in enumerate(rows) if not row.params.greedy]
        ids: dict[int, int] = {}
        if greedy:
            ids.update(zip(greedy, pick_best(_select(logits_RV, greedy)).tolist(), strict=True))
        if sampled:
            drawn_R = draw(_select(logits_RV, sampled), [rows[index] for index in sampled])
            ids.update(zip(sampled, drawn_R.tolist(), strict=True))
        return [ids[index] for index in range(len(rows))]

    def _active_rows(self, rows: Sequence[SampleRow]) -> list[tuple[str, LogitsStep, list[int]]]:
        """Steps with at least one active row, in order."""
        plan: list[tuple[str, LogitsStep, list[int]]] = []
        past_temperature = False
        for name, step in zip(self._names, self._steps, strict=True):
            past_temperature = past_temperature or "temperature" in step.parameters
            sampled_only = past_temperature or step.argmax_invariant
            active = [
                index
                for index, row in enumerate(rows)
                if not (sampled_only and row.params.greedy) and step.is_active(row.params)
            ]
            if active:
                plan.append((name, step, active))
        return plan


def _apply(
    name: str, step: LogitsStep, logits_RV: torch.Tensor, rows: Sequence[SampleRow], active: list[int]
) -> torch.Tensor:
    """logits_RV with the active rows transformed; the others keep their bits."""
    part_RV = _select(logits_RV, active)
    shape = part_RV.shape
    try:
        changed_RV = step.apply(part_RV, [rows[index] for index in active])
    except Exception as error:  # the step is somebody's plugin, and the reason must carry its name
        raise ComponentFailure(f"logits_step '{name}'", f"raised {describe(error)}") from error
    if changed_RV.shape != shape or changed_RV.dtype != torch.float32:
        got = f"{tuple(changed_RV.shape)} {changed_RV.dtype}"
        raise ComponentFailure(f"logits_step '{name}'", f"returned {got}, expected {tuple(shape)} torch.float32")
    if len(active) == len(rows):
        return changed_RV
    return logits_RV.index_copy_(0, torch.tensor(active, device=logits_RV.device), changed_RV)


def _select(logits_RV: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """The rows themselves when all are meant, else a copy of some."""
    if len(indices) == logits_RV.shape[0]:
        return logits_RV
    return logits_RV.index_select(0, torch.tensor(indices, device=logits_RV.device))
