"""The sampler: logits steps in a configured order, then argmax or one keyed draw. Knows no step by its type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from pluglm_samplers.drawing import draw, pick_best, require_tokens
from pluglm_samplers.randomness import Coins

# R: rows, V: vocabulary

DEFAULT_STEPS = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "top_k", "top_p", "min_p",
)  # fmt: skip


_MAX_KNOWN = 4096  # params whose active steps are remembered


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
        self._coins = Coins()
        self._known: dict[int, tuple[SamplingParams, list[bool]]] = {}  # by id, of objects that are kept alive here
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
        is_greedy = [row.params.greedy for row in rows]
        sampled = [index for index, greedy in enumerate(is_greedy) if not greedy]
        for name, step, active in self._active_rows(rows):
            logits_RV = _apply(name, step, logits_RV, rows, active)
        if not sampled:
            return require_tokens(pick_best(logits_RV))
        drawn = draw(_select(logits_RV, sampled), [rows[index] for index in sampled], self._coins.uniform)
        ids = dict(zip(sampled, drawn, strict=True))
        if greedy := [index for index, one in enumerate(is_greedy) if one]:
            ids.update(zip(greedy, pick_best(_select(logits_RV, greedy)), strict=True))
        return require_tokens([ids[index] for index in range(len(rows))])

    def _active_rows(self, rows: Sequence[SampleRow]) -> list[tuple[str, LogitsStep, list[int]]]:
        """Steps with at least one active row, in order."""
        plan: list[tuple[str, LogitsStep, list[int]]] = []
        activity = [self._activity(row.params) for row in rows]
        for number, (name, step) in enumerate(zip(self._names, self._steps, strict=True)):
            active = [index for index, is_active in enumerate(activity) if is_active[number]]
            if active:
                plan.append((name, step, active))
        return plan

    def _activity(self, params: SamplingParams) -> list[bool]:
        """Whether each step has to run for these params, which are asked about again with every token."""
        known = self._known.get(id(params))
        if known is None or known[0] is not params:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[id(params)] = params, list(self._wanted(params))
        return known[1]

    def _wanted(self, params: SamplingParams) -> Iterator[bool]:
        past_temperature = False
        for step in self._steps:
            past_temperature = past_temperature or "temperature" in step.parameters
            is_skipped = params.greedy and (past_temperature or step.argmax_invariant)
            yield not is_skipped and step.is_active(params)


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
