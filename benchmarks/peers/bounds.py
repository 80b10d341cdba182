"""What the machine allows: its measured read bandwidth and GEMM rate, and the speed they bound for a case.

Run as `python -m peers.bounds THREADS`, it prints the two rates as JSON: threads of its own, gone when it ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_BUFFER_BYTES = 512 << 20
_BYTES = 2  # of a bfloat16


@dataclass(frozen=True)
class Rates:
    """bytes_per_s: reading memory. flops_per_s: bfloat16 matrix products (2 a multiply-add)."""

    bytes_per_s: float
    flops_per_s: float

    def best(self, other: Rates) -> Rates:
        """The higher of each: a busy machine only ever lowers what is measured."""
        return Rates(max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s))


@dataclass(frozen=True)
class Shape:
    """Sizes of a llama-like model: what one token costs. head: elements of the output matrix; layers: of the others."""

    layers: int
    head: int
    kv_bytes_a_token: int
    attention_flops_a_pair: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From the keys of a Hugging Face config.json."""
        hidden, depth, dim = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        layer = 2 * hidden * dim * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
        return cls(
            layers=depth * layer,
            head=hidden * config["vocab_size"],
            kv_bytes_a_token=2 * depth * kv_heads * dim * _BYTES,
            attention_flops_a_pair=4 * depth * heads * dim,
        )

    def decode_bound(self, rates: Rates, batch: int, context: int, new_tokens: int) -> float:
        """Tokens/s of the whole batch: a step reads the weights once and every sequence's KV, and multiplies by both.

        The KV is as long as it is in the middle of the run.
        """
        length = context + new_tokens / 2
        read = _BYTES * (self.layers + self.head) + batch * length * self.kv_bytes_a_token
        flops = batch * (2 * (self.layers + self.head) + length * self.attention_flops_a_pair)
        return batch / max(read / rates.bytes_per_s, flops / rates.flops_per_s)

    def prefill_bound(self, rates: Rates, tokens: int) -> float:
        """Prompt tokens/s: logits for the last one only, and half of all pairs (causal)."""
        pairs = tokens * (tokens + 1) / 2
        flops = 2 * (self.layers * tokens + self.head) + pairs * self.attention_flops_a_pair
        return tokens / max(_BYTES * (self.layers + self.head) / rates.bytes_per_s, flops / rates.flops_per_s)

    def bound(self, rates: Rates, request: Mapping[str, Any]) -> float:
        """Tokens/s for a request of `peers.serving`."""
        if request["run"] == "prefill":
            return self.prefill_bound(rates, request["tokens"])
        return self.decode_bound(rates, request["batch"], request["context"], request["new_tokens"])


def measure_rates(threads: int, variables: Mapping[str, str]) -> Rates:
    """In a process of its own, with huge pages, as streaming through 4 KiB pages is slower than memory."""
    command = [sys.executable, "-m", "peers.bounds", str(threads)]
    environment = {**variables, "THP_MEM_ALLOC_ENABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return Rates(**json.loads(done.stdout))


def read_bandwidth() -> float:
    """Bytes/s of reading a buffer much larger than a core's caches: the best of our own reader and three of torch's."""
    import torch

    from pluglm.native import probe
    from pluglm.native.build import NativeBuildError
    from pluglm.native.tools import NativeTools

    values_N = torch.ones(_BUFFER_BYTES // 4)
    values_MK, ones_K = values_N.view(-1, 4096), torch.ones(4096)
    readers = (values_N.view(torch.int64).sum, lambda: torch.dot(values_N, values_N), lambda: values_MK.mv(ones_K))
    rates = [_BUFFER_BYTES / min(_best_seconds(read, 6) for read in readers)]
    with contextlib.suppress(NativeBuildError):  # no compiler: torch's readers say what they can
        rates.append(probe.read_bandwidth(NativeTools(torch.get_num_threads()), _BUFFER_BYTES))
    return max(rates)


def gemm_rate() -> float:
    """Floating-point operations/s of a bfloat16 product, 1024 x 2048 by 2048 x 2048, at torch's thread count."""
    import torch

    left_MK, right_NK = (torch.randn(size, 2048).to(torch.bfloat16) for size in (1024, 2048))
    return 2 * 1024 * 2048 * 2048 / _best_seconds(lambda: torch.nn.functional.linear(left_MK, right_NK), 10)


def _best_seconds(call: Callable[[], Any], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    import torch

    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps({"bytes_per_s": read_bandwidth(), "flops_per_s": gemm_rate()}))
