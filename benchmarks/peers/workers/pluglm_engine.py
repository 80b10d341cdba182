"""pluglm, through its own engine loop, in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Sequence

from peers.serving import Generated, Setup, serve
from pluglm import Engine, SamplingParams

_MOST_SEQUENCES, _STEP_TOKENS = 32, 2048  # room for the largest batch; a prefill of 1,024 in one step, as peers do


class PluglmEngine:
    def __init__(self, setup: Setup) -> None:
        limits = {
            "num_threads": setup.threads, "max_num_seqs": _MOST_SEQUENCES, "max_step_tokens": _STEP_TOKENS,
        }  # fmt: skip
        self._engine = Engine.from_config({"model": {"path": setup.path, "dtype": "bfloat16"}, "engine": limits})
        self.vocab_size = self._engine.tokenizer.vocab_size
        self._num_calls = 0

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        self._num_calls += 1
        names = [f"{self._num_calls}-{i}" for i in range(len(prompts))]
        times: dict[str, list[float]] = {name: [] for name in names}
        token_ids: dict[str, list[int]] = {name: [] for name in names}
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        core = self._engine.core
        started = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            core.add(name, prompt, params)
        while any(map(core.is_live, names)):
            events = core.step()
            now = time.perf_counter()
            for event in events:
                times[event.request_id] += [now] * len(event.token_ids)
                token_ids[event.request_id] += event.token_ids
                if event.error is not None:
                    raise RuntimeError(event.error)
        return Generated(started, list(times.values()), list(token_ids.values()))


if __name__ == "__main__":
    serve(PluglmEngine)
