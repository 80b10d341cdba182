"""llama.cpp through llama-cpp-python's `Llama.generate`, one sequence at a time: it has no batched generation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp

from peers.serving import Generated, Setup, serve

_CONTEXT, _BATCH = 8192, 2048


class LlamaCppPython:
    def __init__(self, setup: Setup) -> None:
        self._model: Any = llama_cpp.Llama(
            setup.path, n_ctx=_CONTEXT, n_batch=_BATCH, n_threads=setup.threads, n_threads_batch=setup.threads,
            verbose=False,
        )  # fmt: skip
        self.vocab_size = int(self._model.n_vocab())

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        if len(prompts) != 1:
            raise ValueError(f"llama-cpp-python generates one sequence at a time, not {len(prompts)}")
        self._model.reset()
        token_ids, moments = [], []
        started = time.perf_counter()
        stream = self._model.generate(list(prompts[0]), temp=0.0, top_k=1, repeat_penalty=1.0)
        for token_id in itertools.islice(stream, new_tokens):
            moments.append(time.perf_counter())
            token_ids.append(int(token_id))
        return Generated(started, [moments], [token_ids])


if __name__ == "__main__":
    serve(LlamaCppPython)
