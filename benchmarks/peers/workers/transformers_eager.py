"""transformers' `generate` in bfloat16, eager, with its own defaults for attention and cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from peers.serving import Generated, Setup, serve


class TransformersEager:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(setup.path, dtype=torch.bfloat16).eval()
        self.vocab_size = int(self._model.config.vocab_size)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        moments: list[float] = []

        def note_time(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            moments.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        inputs = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                do_sample=False, pad_token_id=0, stopping_criteria=[note_time],
            )  # fmt: skip
        return Generated(started, [moments] * len(prompts), out[:, inputs.shape[1] :].tolist())


if __name__ == "__main__":
    serve(TransformersEager)
