"""The step-time model: what a step costs by what it computes; fitted to measured steps, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from pluglm.assembly.validation import validate
from pluglm.kernel.errors import ConfigError
from pluglm.lab.amounts import Number, Strict
from pluglm.lab.steps import Step
from pluglm.lab.trace import file_text

ROUNDS = 10  # of reweighting; the weights settle after three or four

# S: steps, C: coefficients


class StepTime(Strict):
    """Seconds of a step = step_base_s + token_s * tokens + row_s * rows + chunk_s * chunks + context_s * keys.

    The keys of the fake backend's config, with their meaning there, 0 or more.
    """

    step_base_s: Number = 0.0
    token_s: Number = 0.0
    row_s: Number = 0.0
    chunk_s: Number = 0.0
    context_s: Number = 0.0

    def seconds(self, step: Step) -> float:
        """What the model says that a step takes."""
        cost = self.step_base_s + self.token_s * step.num_tokens + self.row_s * step.num_rows
        return cost + self.chunk_s * step.num_chunks + self.context_s * step.num_keys


def fit_step_time(steps: Sequence[Step]) -> StepTime:
    """The model nearest to measured steps, by relative error. ConfigError when there are fewer steps than unknowns.

    Weighted least squares with no negative coefficient: a step weighs 1 / (its modelled seconds)^2, as where errors
    grow with the time measured, found by iterating. One slow step of a thousand is no part of the model, so steps that
    take more than twice or less than half of what the first fit says are left out of the second.
    """
    names = list(StepTime.model_fields)
    if len(steps) < len(names):
        raise ConfigError(f"{len(steps)} steps cannot fit {len(names)} coefficients; measure a longer run")
    features_SC = np.array([(1, s.num_tokens, s.num_rows, s.num_chunks, s.num_keys) for s in steps], dtype=np.float64)
    seconds_S = np.array([step.seconds for step in steps])
    found_C = _reweighted(features_SC, seconds_S)
    modelled_S = features_SC @ found_C
    usual_S = (seconds_S <= 2 * modelled_S) & (seconds_S >= modelled_S / 2)
    if usual_S.sum() >= len(names):
        found_C = _reweighted(features_SC[usual_S], seconds_S[usual_S])
    return StepTime(**dict(zip(names, found_C.tolist(), strict=True)))


def _reweighted(features_SC: np.ndarray, seconds_S: np.ndarray) -> np.ndarray:
    smallest = max(float(seconds_S.max()) * 1e-6, 1e-12)
    weights_S = 1 / np.maximum(seconds_S, smallest)
    found_C = non_negative_least_squares(features_SC * weights_S[:, None], seconds_S * weights_S)
    for _ in range(ROUNDS):
        weights_S = 1 / np.maximum(features_SC @ found_C, smallest)
        found_C = non_negative_least_squares(features_SC * weights_S[:, None], seconds_S * weights_S)
    return found_C


def non_negative_least_squares(matrix_SC: np.ndarray, target_S: np.ndarray) -> np.ndarray:
    """x_C >= 0 that minimises |matrix x - target|.

    The active set method of Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23. Columns are scaled
    first: tokens and keys differ by orders of magnitude.
    """
    scale_C = np.linalg.norm(matrix_SC, axis=0)
    scale_C[scale_C == 0] = 1.0
    scaled_SC = matrix_SC / scale_C
    x_C, free_C = np.zeros(len(scale_C)), np.zeros(len(scale_C), dtype=bool)
    tolerance = 1e-10 * max(float(np.abs(scaled_SC.T @ target_S).max()), 1e-300)
    for _ in range(3 * len(scale_C)):
        gradient_C = scaled_SC.T @ (target_S - scaled_SC @ x_C)
        gradient_C[free_C] = -np.inf
        if gradient_C.max() <= tolerance:
            break
        free_C[int(gradient_C.argmax())] = True
        x_C = _feasible_solution(scaled_SC, target_S, x_C, free_C)
    return np.asarray(x_C / scale_C)


def _feasible_solution(matrix_SC: np.ndarray, target_S: np.ndarray, x_C: np.ndarray, free_C: np.ndarray) -> np.ndarray:
    """The least-squares solution over the free columns; those that would turn negative are fixed at 0 one by one."""
    while True:
        wanted_C = np.zeros_like(x_C)
        wanted_C[free_C] = np.linalg.lstsq(matrix_SC[:, free_C], target_S, rcond=None)[0]
        below_C = free_C & (wanted_C <= 0)
        if not below_C.any():
            return wanted_C
        step = float((x_C[below_C] / np.maximum(x_C[below_C] - wanted_C[below_C], 1e-300)).min())
        x_C = x_C + step * (wanted_C - x_C)
        free_C &= x_C > 1e-14
        x_C[~free_C] = 0.0


def relative_errors(model: StepTime, steps: Sequence[Step]) -> dict[str, float]:
    """How far the model is from the steps: of all seconds together, and the median and 90th percentile step by step."""
    modelled_S = np.array([model.seconds(step) for step in steps])
    seconds_S = np.array([step.seconds for step in steps])
    each_S = np.abs(modelled_S / seconds_S - 1)
    total = float(modelled_S.sum() / seconds_S.sum() - 1)
    return {"total": total, "median": float(np.median(each_S)), "p90": float(np.percentile(each_S, 90))}


def write_step_time(path: Path, model: StepTime, about: dict[str, Any]) -> None:
    """JSON: the coefficients, and beside them what they were fitted to. Raises ConfigError."""
    try:
        path.write_text(json.dumps({**model.model_dump(), "about": about}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


class _StepTimeFile(StepTime):
    about: dict[str, Any] = Field(default_factory=dict)


def read_step_time(path: Path) -> StepTime:
    """What write_step_time wrote. ConfigError names file and key."""
    try:
        data = json.loads(file_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    read = validate(_StepTimeFile, data, str(path))
    return StepTime(**read.model_dump(exclude={"about"}))
