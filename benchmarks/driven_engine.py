"""An engine of ours as the contender of `peers.serving`: all prompts at once, the time of every token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from peers.serving import Generated

from pluglm import Engine, SamplingParams


class DrivenEngine:
    """config: as Engine.from_config takes it. Raises RuntimeError when a request ends with an error."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._engine = Engine.from_config(config)
        self.vocab_size = self._engine.tokenizer.vocab_size
        self._num_calls = 0

    @property
    def kernels(self) -> dict[str, str]:
        """Operation -> the kernel that computes it."""
        return {choice.operation: choice.kernel for choice in self._engine.kernels}

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

    def close(self) -> None:
        self._engine.close()
