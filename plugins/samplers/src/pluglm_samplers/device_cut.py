"""The fast path of a chain on CUDA: top_k, top_p and min_p, one behind the other, are one kernel that does not sort."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kernels import KernelChoice
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.triton_kernels.availability import not_installed
from pluglm_samplers.blocks import SHORT
from pluglm_samplers.fused import OrderStep
from pluglm_samplers.triton.launch import MOST_COLUMNS, cut_rows

# R: rows, V: vocabulary

LIMITS = ("top_k", "top_p", "min_p")  # in the order in which the kernel takes them


@runtime_checkable
class LimitStep(Protocol):
    """Optional ability of a logits step: it does what these of LIMITS say, one parameter each, and nothing else.

    With several, all of them are measured on the row as it comes.
    """

    limits: ClassVar[tuple[str, ...]]


def runs_of(steps: Sequence[Any]) -> dict[int, int]:
    """Step number -> run. The steps of a run follow each other in the chain, with limits in the kernel's order."""
    runs, last = dict[int, int](), len(LIMITS)
    for number, step in enumerate(steps):
        if not isinstance(step, LimitStep) or not step.limits:
            last = len(LIMITS)
            continue
        places = [LIMITS.index(name) for name in step.limits]
        is_next = number - 1 in runs and places[0] > last
        runs[number] = runs[number - 1] if is_next else number
        last = places[-1]
    return runs


def look_for_fast_path(steps: Sequence[Any], context: BuildContext) -> str | None:
    """`refusal` for a run, whose log is told whether truncations on CUDA are the kernel, and if not, why."""
    reason = refusal(steps, context.device, context.spec.vocab_size)
    if torch.device(context.device).type == "cuda" and runs_of(steps):
        kernel, passed_over = ("triton", ()) if reason is None else ("torch", (("triton", reason),))
        context.kernels.add(KernelChoice("truncation", kernel, passed_over))
    return reason


def refusal(steps: Sequence[Any], device: str, vocab_size: int) -> str | None:
    """Why the fast path of a chain cannot be had, or None. device: a torch name; vocab_size: logits of a row.

    Single rows and requests may do without it all the same, see `fused` and `ChainConfig`.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        if not runs_of(steps):
            return f"none of sampler.steps is one of {', '.join(LIMITS)}"
        if vocab_size > MOST_COLUMNS:
            return f"rows have {vocab_size} logits; the kernel takes {MOST_COLUMNS}"
        return not_installed()
    if kind != "cpu":
        return f"rows are on {kind}, neither on a CPU nor on CUDA"
    if not any(isinstance(step, OrderStep) for step in steps):
        return "none of sampler.steps looks at logits alone"
    return f"rows have {vocab_size} logits; up to {SHORT} are short already" if vocab_size <= SHORT else None


def can_cut(logits_RV: torch.Tensor) -> bool:
    """Whether these rows can be cut by the kernel."""
    return logits_RV.is_cuda and logits_RV.shape[1] <= MOST_COLUMNS and not_installed() is None


def cut(active: Mapping[Any, Sequence[int] | None], logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """All steps of a run at once, in place. active: step -> its active rows; None is all of them."""
    size = logits_RV.shape[1]
    neutral = {"top_k": size, "top_p": 1.0, "min_p": 0.0}
    values: dict[str, list[float]] = {name: [one] * len(rows) for name, one in neutral.items()}
    for step, indices in active.items():
        for index in range(len(rows)) if indices is None else indices:
            for name in step.limits:
                values[name][index] = _limit(name, rows[index].params, size)
    gaps = [math.log(one) if one > 0 else -math.inf for one in values["min_p"]]
    device = logits_RV.device
    return cut_rows(
        logits_RV,
        torch.tensor(values["top_k"], dtype=torch.int32, device=device),
        torch.tensor(values["top_p"], dtype=torch.float64, device=device),
        torch.tensor(gaps, dtype=torch.float32, device=device),
        is_joint=any(len(step.limits) > 1 for step in active),
    )


def _limit(name: str, params: SamplingParams, size: int) -> float:
    value: float = getattr(params, name)
    return (min(int(value), size) if value > 0 else size) if name == "top_k" else value
