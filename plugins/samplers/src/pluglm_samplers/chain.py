"""The sampler: logits steps in a configured order, then argmax or one keyed draw. Knows no step by its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, Self

import torch
from pydantic import ValidatorFunctionWrapHandler, field_validator, model_validator

from pluglm.kernel.config import Slot
from pluglm.kernel.core import SampleRow
from pluglm.kernel.errors import ComponentFailure, ConfigError, describe
from pluglm.kernel.interfaces.component import BuildContext, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.sampler import FINAL_ROWS, NO_TOKEN, LogitsStep, Sampler
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.verification.randomness import Coins
from pluglm_samplers.admission import unsupported
from pluglm_samplers.blocks import on_host
from pluglm_samplers.building import build_step
from pluglm_samplers.chain_plan import Plan, Planner, Steps
from pluglm_samplers.device_cut import LIMITS, can_cut, cut, look_for_fast_path, runs_of
from pluglm_samplers.drawing import draw, final_probabilities, one_hot_rows, pick_best
from pluglm_samplers.fused import MOST_KEPT, Candidates, find_candidates
from pluglm_samplers.presets import PRESETS, Preset

# R: rows, V: vocabulary

DEFAULT_STEPS = PRESETS["default"]


class ChainConfig(ComponentConfig):
    """preset: a named order of steps. steps: an order of one's own, each a name or {use: NAME, ...the step's own keys}.

    Without either it is the preset `default`. steps [] draws from the raw logits.
    fast: whether truncations may be fused; false takes every row step by step, true refuses a run or a request that
    cannot be fused. The tokens are the same: on the host bit for bit, on CUDA up to the rounding of top_p's masses (see
    `triton.cut`). With true too, rows on the host are taken whole where their probabilities are asked for, where one of
    their batch has too many candidates (ties) or no finite best logit, and where more of them are cut by another step.
    """

    preset: Preset | None = None
    fast: bool | Literal["auto"] = "auto"
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
        """By value: a config that spells out the steps of its preset is the same config."""
        if self.preset is not None and self.steps != tuple(Slot(use=name) for name in PRESETS[self.preset]):
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
        may_fuse = config.fast is not False
        self._planner, self._device_planner = Planner(self._steps, may_fuse), Planner(self._steps, False)
        self._runs = runs_of(self._steps) if may_fuse else {}
        reason = look_for_fast_path(self._steps, context) if may_fuse else None
        if config.fast is True and reason is not None:
            raise ConfigError(f"sampler.fast: true cannot be had: {reason}; set it to auto")
        self._device_of_fast = torch.device(context.device).type if config.fast is True else None
        self._parameters = frozenset(name for step in self._steps for name in step.parameters)

    @classmethod
    def capabilities(cls, config: ChainConfig) -> Capabilities:
        return Capabilities(provides=frozenset({FINAL_ROWS}))

    @classmethod
    def uses(cls, config: ChainConfig) -> list[tuple[str, str, Mapping[str, Any]]]:
        return [("logits_step", use.use, use.options) for use in config.steps]

    @classmethod
    def check_early(cls, config: ChainConfig, params: SamplingParams, parts: Sequence[type[Any]]) -> str | None:
        """Names a parameter for which no step is configured."""
        supported = frozenset(name for step in parts for name in step.parameters)
        return _unread(params, supported, [use.use for use in config.steps])

    def check(self, params: SamplingParams) -> str | None:
        """Names a parameter for which no step is configured, which would be ignored, or says why `fast: true` fails."""
        unread = _unread(params, self._parameters, self._names)
        return unread if unread or not self._device_of_fast else self._slow(params)

    def _slow(self, params: SamplingParams) -> str | None:
        """Why a request would be taken step by step where `fast: true` is configured."""
        kind = self._planner.kind(params)
        if kind.is_greedy:
            return None
        if self._device_of_fast == "cuda":
            is_fast, wanted = any(number in self._runs for number in kind.steps), f"one of {', '.join(LIMITS)}"
        else:
            is_fast = kind.fusing is not None
            wanted = f"a top_k of at most {MOST_KEPT}, and steps behind it that look at logits alone"
        return None if is_fast else f"sampler.fast: true cannot be had for it: that takes {wanted}"

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """See the contract; NO_TOKEN for a row without a token. ComponentFailure names a step that broke its own."""
        plan = self._plan(logits_RV, rows)
        logits_RV = self._through(plan.steps, logits_RV, rows)
        ids: dict[int, int] = {}
        for indices, take in ((plan.fused, self._draw_few), (plan.sampled, self._draw), (plan.greedy, self._pick)):
            if len(indices) == len(rows):
                return take(logits_RV, rows, plan)
            if indices:
                found = take(_select(logits_RV, indices), [rows[index] for index in indices], plan)
                ids.update(zip(indices, found, strict=True))
        return [ids[index] for index in range(len(rows))]

    def final_rows(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """See the contract."""
        plan = self._plan(logits_RV, rows)
        logits_RV = self._through(plan.steps, logits_RV, rows)
        if plan.fused_steps:  # of whole rows, since they are asked for
            fused_RV = self._through(plan.fused_steps, _select(logits_RV, plan.fused), [rows[i] for i in plan.fused])
            logits_RV[plan.fused] = fused_RV
        probs_RV = final_probabilities(logits_RV)
        if plan.greedy:
            best = pick_best(_select(logits_RV, plan.greedy))
            probs_RV[plan.greedy] = one_hot_rows(best, logits_RV)
        return probs_RV

    def _plan(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> Plan:
        """Only on the host are rows made short: elsewhere a kernel takes them as they are."""
        planner = self._planner if on_host(logits_RV) else self._device_planner
        return planner.plan([row.params for row in rows])

    def _through(self, steps: Steps, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        if not self._runs or not can_cut(logits_RV):
            for number, active in steps:
                logits_RV = _apply(self._names[number], self._steps[number], logits_RV, rows, active)
            return logits_RV
        for _, run in groupby(steps, lambda one: self._runs.get(one[0], -1 - one[0])):
            rows_of = dict(run)
            number = next(iter(rows_of))
            if number in self._runs:
                logits_RV = self._cut(rows_of, logits_RV, rows)
            else:
                logits_RV = _apply(self._names[number], self._steps[number], logits_RV, rows, rows_of[number])
        return logits_RV

    def _cut(
        self, active: dict[int, list[int] | None], logits_RV: torch.Tensor, rows: Sequence[SampleRow]
    ) -> torch.Tensor:
        try:
            return cut({self._steps[number]: indices for number, indices in active.items()}, logits_RV, rows)
        except Exception as error:
            names = ", ".join(self._names[number] for number in active)
            raise ComponentFailure(f"logits_steps {names}", f"raised {describe(error)} in their kernel") from error

    def _pick(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow], plan: Plan) -> list[int]:
        return pick_best(logits_RV)

    def _draw(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow], plan: Plan) -> list[int]:
        return draw(logits_RV, rows, self._coins.uniform)

    def _draw_few(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow], plan: Plan) -> list[int]:
        """Of the tokens that the fused steps may keep; of whole rows where these are too many."""
        found, logits_RV, steps = self._candidates(logits_RV, rows, plan)
        if found is None:
            return self._draw(self._through(steps, logits_RV, rows), rows, plan)
        places = self._draw(self._through(steps, found.logits_RC, rows), rows, plan)
        return [NO_TOKEN if place == NO_TOKEN else ids_C[place] for place, ids_C in zip(places, found.ids, strict=True)]

    def _candidates(
        self, logits_RV: torch.Tensor, rows: Sequence[SampleRow], plan: Plan
    ) -> tuple[Candidates | None, torch.Tensor, Steps]:
        """Candidates, else whole rows, and the steps to come. Where none are found before the leading steps, these run
        on whole rows, and candidates are looked for behind them."""
        leading, steps = plan.leading, plan.fused_steps
        if leading:
            found = find_candidates(logits_RV, plan.num_kept, lambda probe_R3: self._through(leading, probe_R3, rows))
            if found is not None:
                return found, logits_RV, steps
            logits_RV, steps = self._through(leading, logits_RV, rows), steps[len(leading) :]
        return find_candidates(logits_RV, plan.num_kept), logits_RV, steps


def _unread(params: SamplingParams, supported: frozenset[str], steps: Sequence[str]) -> str | None:
    wanted, have = unsupported(params, supported), ", ".join(steps) or "none"
    return f"{wanted} needs a logits step that is not in sampler.steps (configured: {have})" if wanted else None


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
