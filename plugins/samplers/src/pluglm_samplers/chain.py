"""The sampler: logits steps in a configured order, then argmax or one keyed draw. Knows no step by its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, Self

import torch
from pydantic import ValidatorFunctionWrapHandler, field_validator, model_validator

from pluglm.kernel.config import Slot
from pluglm.kernel.core import SampleRow
from pluglm.kernel.errors import ComponentFailure, describe
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep, Sampler
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.admission import unsupported
from pluglm_samplers.building import build_step
from pluglm_samplers.columns import PerParams
from pluglm_samplers.drawing import draw, pick_best
from pluglm_samplers.presets import PRESETS, Preset
from pluglm_samplers.randomness import Coins

# R: rows, V: vocabulary

DEFAULT_STEPS = PRESETS["default"]


class _Kind(NamedTuple):
    """What rows have in common: the steps that are active for them, by number."""

    is_greedy: bool
    steps: tuple[int, ...]


class _Plan(NamedTuple):
    """What a batch with these params takes; one step after another usually has the same. Rows by number.

    steps: by number, each with its active rows, None is all. params: kept alive, since they are known by identity.
    """

    params: list[SamplingParams]
    steps: list[tuple[int, list[int] | None]]
    sampled: list[int]
    greedy: list[int]


class ChainConfig(ComponentConfig):
    """preset: a named order of steps. steps: an order of one's own, each a name or {use: NAME, ...the step's own keys}.

    Steps take the place of the preset `default`, and are refused beside another. steps [] draws from the raw logits.
    """

    preset: Preset = "default"
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

    @model_validator(mode="before")
    @classmethod
    def _steps_of_preset(cls, data: Any) -> Any:
        preset = data.get("preset") if isinstance(data, dict) and "steps" not in data else None
        return {**data, "steps": PRESETS[preset]} if isinstance(preset, str) and preset in PRESETS else data

    @model_validator(mode="after")
    def _one_order(self) -> Self:
        """By value: a config that spells out the steps of its preset, or the default preset, is the same config."""
        if self.preset != "default" and self.steps != tuple(Slot(use=name) for name in PRESETS[self.preset]):
            raise ValueError(f"preset {self.preset} has steps of its own; leave out preset or steps")
        return self


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
            self._steps.append(build_step(step_class, step_config, context))
        self._coins = Coins()
        self._wanted = PerParams(self._want)
        self._last = _Plan([], [], [], [])
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
        """See the contract; NO_TOKEN for a row without a token. ComponentFailure names a step that broke its own."""
        params = [row.params for row in rows]
        plan = self._last
        if len(params) != len(plan.params) or not all(map(is_, params, plan.params)):
            plan = self._last = self._plan(params)
        for number, active in plan.steps:
            logits_RV = _apply(self._names[number], self._steps[number], logits_RV, rows, active)
        if not plan.sampled:
            return pick_best(logits_RV)
        if not plan.greedy:
            return draw(logits_RV, rows, self._coins.uniform)
        drawn = draw(_select(logits_RV, plan.sampled), [rows[index] for index in plan.sampled], self._coins.uniform)
        best = pick_best(_select(logits_RV, plan.greedy))
        ids = dict(zip([*plan.sampled, *plan.greedy], [*drawn, *best], strict=True))
        return [ids[index] for index in range(len(rows))]

    def _plan(self, params: list[SamplingParams]) -> _Plan:
        wanted = [self._wanted(one) for one in params]
        kinds, steps = set(wanted), list[tuple[int, list[int] | None]]()
        for number in sorted({number for kind in kinds for number in kind.steps}):
            active = [row for row, kind in enumerate(wanted) if number in kind.steps]
            steps.append((number, active if len(active) < len(wanted) else None))
        sampled = [row for row, kind in enumerate(wanted) if not kind.is_greedy]
        return _Plan(params, steps, sampled, [row for row, kind in enumerate(wanted) if kind.is_greedy])

    def _want(self, params: SamplingParams) -> _Kind:
        past_temperature, steps = False, list[int]()
        for number, step in enumerate(self._steps):
            past_temperature = past_temperature or "temperature" in step.parameters
            is_skipped = params.greedy and (past_temperature or step.argmax_invariant)
            if not is_skipped and step.is_active(params):
                steps.append(number)
        return _Kind(params.greedy, tuple(steps))


def _apply(
    name: str, step: LogitsStep, logits_RV: torch.Tensor, rows: Sequence[SampleRow], active: list[int] | None
) -> torch.Tensor:
    """logits_RV with the active rows (None: all of them) transformed; the others keep their bits."""
    part_RV = logits_RV if active is None else _select(logits_RV, active)
    shape = part_RV.shape
    try:
        changed_RV = step.apply(part_RV, rows if active is None else [rows[index] for index in active])
    except Exception as error:  # the step is somebody's plugin, and the reason must carry its name
        raise ComponentFailure(f"logits_step '{name}'", f"raised {describe(error)}") from error
    if changed_RV.shape != shape or changed_RV.dtype != torch.float32:
        got = f"{tuple(changed_RV.shape)} {changed_RV.dtype}"
        raise ComponentFailure(f"logits_step '{name}'", f"returned {got}, expected {tuple(shape)} torch.float32")
    if active is None:
        return changed_RV
    return logits_RV.index_copy_(0, torch.tensor(active, device=logits_RV.device), changed_RV)


def _select(logits_RV: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """A copy of some rows."""
    return logits_RV.index_select(0, torch.tensor(indices, device=logits_RV.device))
