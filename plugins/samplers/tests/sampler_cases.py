"""Shared by the sampler tests: contexts, rows, steps and random logits. Holds no expected value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.kernels import KernelLog
from pluglm.kernel.interfaces.logits_params import MIROSTAT_REPLACES
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.building import build_step
from pluglm_samplers.chain import ChainConfig, ChainSampler


def resolve(kind: str, name: str, options: dict[str, Any]) -> tuple[type, Any]:
    """What the kernel's resolver does, in three lines: the entry point's class, and its config."""
    (found,) = entry_points(group=f"pluglm.{kind}", name=name)
    component: Any = found.load()
    return component, component.Config(**options)


def context(vocab_size: int, eos_token_ids: Iterable[int] = ()) -> Any:
    return SimpleNamespace(
        resolve_component=resolve,
        spec=SimpleNamespace(vocab_size=vocab_size),
        device="cpu",
        kernels=KernelLog(),
        eos_token_ids=frozenset(eos_token_ids),
    )


def chain(vocab_size: int, *, eos_token_ids: Iterable[int] = (), **config: Any) -> ChainSampler:
    return ChainSampler(ChainConfig.model_validate(config), context(vocab_size, eos_token_ids))


def step(name: str, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> LogitsStep:
    return build_step(*resolve("logits_step", name, {}), context(vocab_size, eos_token_ids))


def transformed(names: Sequence[str], logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """What is left of a copy of logits_RV after these steps, each on the rows it is active for."""
    result_RV = logits_RV.clone()
    for name in names:
        one = step(name, logits_RV.shape[1])
        active = [index for index, row in enumerate(rows) if one.is_active(row.params)]
        if active:
            result_RV[active] = one.apply(result_RV[active], [rows[index] for index in active])
    return result_RV


def kept(names: Sequence[str], logits: Sequence[float], **params: Any) -> list[int]:
    """Ids that these steps leave of one row."""
    result_RV = transformed(names, torch.tensor([list(logits)]), [row(SamplingParams(**params))])
    return torch.nonzero(result_RV[0] > -torch.inf).flatten().tolist()


def row(
    params: SamplingParams | None = None, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (),
    seed: int = 0, lane: int = 0, position: int = 0,
) -> SampleRow:  # fmt: skip
    chosen = params or SamplingParams()
    return SampleRow(
        params=chosen, prompt_token_ids=prompt, output_token_ids=list(output), seed=seed, lane=lane, position=position
    )


def random_logits(num_rows: int, vocab_size: int, seed: int, ties: bool = True) -> torch.Tensor:
    """Rows of many scales: continuous, coarse (many ties) if ties, half masked, one token alive."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(num_rows, vocab_size, generator=generator) * 4
    if ties:
        logits_RV[1::4] = logits_RV[1::4].round()
    logits_RV[2::4, ::2] = -torch.inf
    logits_RV[3::4, 1:] = -torch.inf
    return logits_RV


def random_params(generator: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    """Every parameter that a step reads, each of them off in about a half of the cases."""

    def pick(off: Any, *on: Any) -> Any:
        return off if generator.random() < 0.5 else on[int(generator.integers(len(on)))]

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(one) for one in generator.integers(0, vocab_size, count))

    mirostat = pick(0, 0, 1, 2)
    low, high = pick((0.0, 0.0), (0.2, 1.5), (0.0, 0.8), (1.3, 1.3))
    params = {
        "temperature": pick(1.0, 0.7, 2.5, 0.05),
        "top_k": pick(0, -1, 1, 3, vocab_size, vocab_size + 9),
        "top_p": pick(1.0, 0.9, 0.37, 0.0),
        "min_p": pick(0.0, 0.03, 0.4, 1.0),
        "typical_p": pick(1.0, 0.9, 0.4, 0.0),
        "top_n_sigma": pick(0.0, 0.5, 1.0, 2.5),
        "epsilon_cutoff": pick(0.0, 1e-3, 0.1, 0.6),
        "eta_cutoff": pick(0.0, 1e-3, 0.1, 0.6),
        "xtc_probability": pick(0.0, 0.5, 1.0),
        "xtc_threshold": pick(0.1, 0.0, 0.3, 0.6),
        "mirostat": mirostat,
        "mirostat_tau": pick(5.0, 0.3, 1.0, 2.0),
        "mirostat_eta": pick(0.1, 0.0, 0.7),
        "dynatemp_low": low,
        "dynatemp_high": high,
        "dynatemp_exponent": pick(1.0, 0.5, 3.0),
        "repetition_penalty": pick(1.0, 1.3, 0.8),
        "frequency_penalty": pick(0.0, 0.4, -0.3),
        "presence_penalty": pick(0.0, 0.9, -0.6),
        "dry_multiplier": pick(0.0, 0.8, 2.0),
        "dry_base": pick(1.75, 1.0, 3.0),
        "dry_allowed_length": pick(2, 1, 3),
        "dry_breaker_ids": pick((), ids(1), ids(2)),
        "logit_bias": pick({}, dict.fromkeys(ids(3), 2.5), {0: -100.0}, {vocab_size - 1: 1e300}),
        "allowed_token_ids": pick(None, None, ids(2 + vocab_size // 2), (0, *ids(1))),
        "bad_words_ids": pick((), (ids(1),), (ids(1), ids(2), ids(3)), (ids(2),) * 2),
        "min_tokens": pick(0, 3, 20),
        "stop_token_ids": pick((), ids(1), ids(3)),
    }
    return params if not mirostat else {name: one for name, one in params.items() if name not in MIROSTAT_REPLACES}


def random_row(generator: np.random.Generator, vocab_size: int) -> SampleRow:
    """With tokens of a small alphabet, so that runs repeat."""
    params = SamplingParams(**random_params(generator, vocab_size))
    alphabet = generator.integers(0, vocab_size, 3)
    prompt, output = (tuple(int(alphabet[i]) for i in generator.integers(0, 3, n)) for n in (6, 8))
    return replace(row(params), prompt_token_ids=prompt, output_token_ids=list(output))
