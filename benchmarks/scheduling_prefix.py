"""Prefix reuse: prompts that share 512 tokens, on KV managers with and without a prefix cache, interleaved."""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from typing import Any

from pluglm import Engine, SamplingParams

MANAGERS = ("paged", "hash_prefix", "radix")
NUM_REQUESTS, SHARED, OWN, OUTPUT, SEATS = 32, 512, 32, 8, 8
TARGET_CUT, TARGET_TTFT = 0.8, 3.0


def make_prompts(vocab_size: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    shared = [generator.randrange(100, vocab_size) for _ in range(SHARED)]
    return [shared + [generator.randrange(100, vocab_size) for _ in range(OWN)] for _ in range(NUM_REQUESTS)]


def run_once(engine: Engine, prompts: list[list[int]]) -> tuple[float, int, list[tuple[int, ...]]]:
    """Median TTFT in seconds, prompt tokens that were computed, and the output tokens. The cache begins empty."""
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": one} for one in prompts], params)
    metrics = [one.metrics for one in outputs if one.metrics is not None and one.metrics.ttft_s is not None]
    if len(metrics) != len(prompts):
        raise RuntimeError(f"of {len(prompts)} requests {len(metrics)} gave a token: {outputs[0].error}")
    computed = sum(one.num_prompt_tokens - one.num_cached_tokens for one in metrics)
    ttft_s = statistics.median(one.ttft_s for one in metrics if one.ttft_s is not None)
    return ttft_s, computed, [tuple(one.token_ids) for one in outputs]


def measure_prefix(threads: int, rounds: int) -> dict[str, Any]:
    """All requests arrive at once. Each round draws new tokens, the same ones for every manager."""
    ttft: dict[str, list[float]] = {name: [] for name in MANAGERS}
    computed: dict[str, int] = dict.fromkeys(MANAGERS, 0)
    same: dict[str, int] = dict.fromkeys(MANAGERS, 0)
    with ExitStack() as stack:
        settings = {"num_threads": threads, "max_num_seqs": SEATS}
        engines = {name: stack.enter_context(Engine.from_config({"engine": settings, "kv": name})) for name in MANAGERS}
        for seed in range(rounds):
            prompts = make_prompts(engines["paged"].tokenizer.vocab_size, seed)
            outputs = {}
            for name, engine in engines.items():
                ttft_s, num_computed, outputs[name] = run_once(engine, prompts)
                ttft[name].append(ttft_s)
                computed[name] += num_computed
            for name in MANAGERS:
                same[name] += sum(a == b for a, b in zip(outputs[name], outputs["paged"], strict=True))
    total = rounds * NUM_REQUESTS * (SHARED + OWN)
    results: dict[str, Any] = {}
    for name in MANAGERS:
        results[name] = {
            "ttft_s": ttft[name],
            "prompt_tokens_computed": computed[name],
            "cut": 1 - computed[name] / total,
            "ttft_ratio": statistics.median(ttft["paged"]) / statistics.median(ttft[name]),
            "outputs_equal_to_paged": same[name] / (rounds * NUM_REQUESTS),
        }
        print(
            f"{name:12} prefill tokens cut by {100 * results[name]['cut']:.0f} % (target {100 * TARGET_CUT:.0f}), "
            f"TTFT {1000 * statistics.median(ttft[name]):.0f} ms, ratio {results[name]['ttft_ratio']:.1f} "
            f"(target {TARGET_TTFT}), {100 * results[name]['outputs_equal_to_paged']:.0f} % of outputs as paged"
        )
    return {"requests": NUM_REQUESTS, "shared_tokens": SHARED, "own_tokens": OWN, "seats": SEATS, "results": results}
