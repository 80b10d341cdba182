"""One component swapped, everything else the same: two attention plugins on the same prompts, greedy in float32.

    python examples/compare_attention.py [NAME ...]

The first name is the reference, naive if none is given. Says whether the others give the same tokens, and the speeds.
"""

from __future__ import annotations

import sys
import time

from pluglm import Engine, RunConfig, SamplingParams

BASE = {
    "model": {"path": "smollm2-135m-instruct", "dtype": "float32"},
    "backend": {"use": "cpu"},
    "sampling": {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True},
}
PROMPTS = ["The capital of France is", "Once upon a time", "Water boils at a temperature of"]


def tokens_and_speed(attention: str) -> tuple[list[list[int]], float]:
    """Output tokens of every prompt, and tokens a second over all of them."""
    with Engine.from_config(RunConfig.from_dict({**BASE, "attention": attention})) as engine:
        engine.generate("warm up", SamplingParams(temperature=0.0, max_tokens=2))
        started = time.perf_counter()
        tokens = [output.token_ids for output in engine.generate(PROMPTS)]
        return tokens, sum(map(len, tokens)) / (time.perf_counter() - started)


def main() -> None:
    names = sys.argv[1:] or ["naive", "sdpa"]
    reference, speed = tokens_and_speed(names[0])
    print(f"{names[0]:10} {speed:7.1f} tokens/s  the reference")
    for name in names[1:]:
        tokens, speed = tokens_and_speed(name)
        verdict = "the same tokens" if tokens == reference else "DIFFERENT tokens"
        print(f"{name:10} {speed:7.1f} tokens/s  {verdict}")


if __name__ == "__main__":
    main()
