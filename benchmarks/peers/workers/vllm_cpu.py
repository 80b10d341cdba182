"""vLLM's CPU build with its defaults (torch.compile with inductor, chunked prefill), but no prefix cache.

Its engine is stepped in this process; the driver sets the environment variables that bind its threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from peers.serving import Generated, Setup, serve


class VllmCpu:
    def __init__(self, setup: Setup) -> None:
        llm = LLM(setup.path, dtype="bfloat16", enable_prefix_caching=False)
        self._engine: Any = llm.llm_engine
        self.vocab_size = int(self._engine.model_config.get_vocab_size())
        self._num_requests = 0

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        times: dict[str, list[float]] = {}
        token_ids: dict[str, list[int]] = {}
        started = time.perf_counter()
        for prompt in prompts:
            name = str(self._num_requests)
            self._num_requests += 1
            times[name], token_ids[name] = [], []
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                known = list(output.outputs[0].token_ids)
                times[output.request_id] += [now] * (len(known) - len(times[output.request_id]))
                token_ids[output.request_id] = known
        return Generated(started, list(times.values()), list(token_ids.values()))


if __name__ == "__main__":
    serve(VllmCpu)
