"""Shared by the sampler tests: contexts, rows and random logits. Holds no expected value."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.chain import ChainConfig, ChainSampler


def resolve(kind: str, name: str, options: dict[str, Any]) -> tuple[type, Any]:
    """What the kernel's resolver does, in three lines: the entry point's class, and its config."""
    (found,) = entry_points(group=f"pluglm.{kind}", name=name)
    component: Any = found.load()
    return component, component.Config(**options)


def context(vocab_size: int) -> Any:
    return SimpleNamespace(resolve_component=resolve, spec=SimpleNamespace(vocab_size=vocab_size))


def chain(vocab_size: int, **config: Any) -> ChainSampler:
    return ChainSampler(ChainConfig.model_validate(config), context(vocab_size))


def row(
    params: SamplingParams | None = None, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (),
    seed: int = 0, lane: int = 0, position: int = 0,
) -> SampleRow:  # fmt: skip
    chosen = params or SamplingParams()
    return SampleRow(
        params=chosen, prompt_token_ids=prompt, output_token_ids=list(output), seed=seed, lane=lane, position=position
    )


def random_logits(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Rows of many scales: continuous, coarse (many ties), half masked, one token alive."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(num_rows, vocab_size, generator=generator) * 4
    logits_RV[1::4] = logits_RV[1::4].round()
    logits_RV[2::4, ::2] = -torch.inf
    logits_RV[3::4, 1:] = -torch.inf
    return logits_RV


def random_row(generator: np.random.Generator, vocab_size: int) -> SampleRow:
    params = SamplingParams(
        temperature=float(generator.choice([1.0, 0.7, 2.5, 0.05])),
        top_k=int(generator.choice([0, -1, 1, 3, vocab_size, vocab_size + 9])),
        top_p=float(generator.choice([1.0, 0.9, 0.37, 0.0])),
        min_p=float(generator.choice([0.0, 0.03, 0.4, 1.0])),
        repetition_penalty=float(generator.choice([1.0, 1.3, 0.8])),
        frequency_penalty=float(generator.choice([0.0, 0.4, -0.3])),
        presence_penalty=float(generator.choice([0.0, 0.9, -0.6])),
    )
    prompt, output = (tuple(int(i) for i in generator.integers(0, vocab_size, n)) for n in (4, 6))
    return replace(row(params), prompt_token_ids=prompt, output_token_ids=list(output))
