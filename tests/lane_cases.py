"""What the lanes of a request on the fake backend must be, drawn one by one from the documented logits."""

from __future__ import annotations

from typing import Any

import torch

from pluglm import Engine, SamplingParams
from pluglm.backends.fake_model import hashed_logits, prefix_digest
from pluglm.kernel.core import SampleRow

SAMPLED = SamplingParams(temperature=1.5, seed=5, max_tokens=8, ignore_eos=True)
VOCAB = 320  # of the tiny model and its tokenizer
PROMPT = [5, 6, 7, 8, 9, 10]


def logits_after(tokens: list[int]) -> torch.Tensor:
    """logits_V of what follows, by the fake backend's docstrings."""
    pairs_P2 = torch.stack((torch.tensor(tokens), torch.arange(len(tokens))), dim=1)
    return hashed_logits(prefix_digest(pairs_P2), VOCAB)


def expected_lane(engine: Engine, prompt: list[int], params: SamplingParams, lane: int, count: int) -> list[int]:
    """The engine's sampler asked for one token after another, as the keys (seed, lane, position) say."""
    sampler: Any = engine._core.parts.sampler
    output: list[int] = []
    for position in range(count):
        row = SampleRow(
            params=params,
            prompt_token_ids=tuple(prompt),
            output_token_ids=list(output),
            seed=params.seed or 0,
            lane=lane,
            position=position,
        )
        output += sampler.sample(logits_after(prompt + output)[None], [row])
    return output


def expected_lanes(engine: Engine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    return [expected_lane(engine, prompt, params, lane, params.max_tokens or 0) for lane in range(params.n)]


def asking(base: SamplingParams = SAMPLED, **changes: Any) -> SamplingParams:
    """A checked copy."""
    return SamplingParams.model_validate({**base.model_dump(), **changes})
