"""OpenVINO GenAI's continuous batching (what its LLMPipeline runs on), which reads the GGUF file itself.

Its plugin chooses the arithmetic (bfloat16 where the CPU has it), unless OPENVINO_PRECISION names another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from peers.serving import Generated, Setup, serve

_CACHE_GB, _MOST_SEQUENCES, _STEP_TOKENS = 2, 32, 8192


class OpenvinoGenai:
    def __init__(self, setup: Setup) -> None:
        limits = openvino_genai.SchedulerConfig()
        limits.cache_size, limits.max_num_seqs, limits.max_num_batched_tokens = _CACHE_GB, _MOST_SEQUENCES, _STEP_TOKENS
        limits.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads}
        if "OPENVINO_PRECISION" in os.environ:
            properties["INFERENCE_PRECISION_HINT"] = os.environ["OPENVINO_PRECISION"]
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(setup.path, limits, "CPU", properties)
        vocab = self._pipeline.get_tokenizer().get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        self._num_requests = 0

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        params = openvino_genai.GenerationConfig()
        params.max_new_tokens, params.ignore_eos, params.do_sample = new_tokens, True, False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        started = time.perf_counter()
        handles = [self._pipeline.add_request(self._num_requests + i, one, params) for i, one in enumerate(inputs)]
        self._num_requests += len(inputs)
        times: list[list[float]] = [[] for _ in handles]
        token_ids: list[list[int]] = [[] for _ in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        times[i] += [now] * len(output.generated_ids)
                        token_ids[i] += output.generated_ids
        return Generated(started, times, token_ids)


if __name__ == "__main__":
    serve(OpenvinoGenai)
