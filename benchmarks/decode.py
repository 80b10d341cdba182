"""Decode speed beside transformers' `generate`: same weights, same threads, one process, runs interleaved.

    python benchmarks/decode.py [--threads 2] [--rounds 5] [--tokens 64] [--dtype bfloat16] [--record FILE.json]

Prints the median tokens/s of both at batch 1 and 8 and their ratio, and writes a JSON record.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pluglm import Engine, RunConfig, SamplingParams

PROMPT = "The history of the printing press begins in the fifteenth century, when"


def build_peer(dtype: torch.dtype, folder: Path) -> Any:
    """The same checkpoint in transformers: our dequantised tensors under a config it understands."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from pluglm.weights.open import open_checkpoint
    from pluglm.weights.resolve import resolve_model

    checkpoint = open_checkpoint(resolve_model("smollm2-135m-instruct"))
    (folder / "config.json").write_text(json.dumps(dict(checkpoint.config)))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    state = {name: checkpoint.tensor(name, dtype) for name in model.state_dict() if checkpoint.shape(name) is not None}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    checkpoint.close()
    return model.eval()


def time_ours(engine: Engine, prompt_ids: list[int], batch: int, num_tokens: int) -> tuple[float, list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": prompt_ids}] * batch, params)
    return batch * num_tokens / (time.perf_counter() - started), outputs[0].token_ids


def time_peer(model: Any, prompt_ids: list[int], batch: int, num_tokens: int) -> tuple[float, list[int]]:
    inputs = torch.tensor([prompt_ids] * batch)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return batch * num_tokens / (time.perf_counter() - started), out[0, len(prompt_ids) :].tolist()


def interleave(runs: dict[str, Callable[[], tuple[float, list[int]]]], rounds: int) -> dict[str, list[float]]:
    """Each round runs every contender once, so that a busy machine slows all of them alike."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # warm up
    for _ in range(rounds):
        for name, run in runs.items():
            speeds[name].append(run()[0])
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--record", type=Path, default=Path("benchmarks/records/decode.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    config = RunConfig.from_dict({"model": {"dtype": options.dtype}, "engine": {"num_threads": options.threads}})
    results = []
    with Engine.from_config(config) as engine, tempfile.TemporaryDirectory() as folder:
        peer = build_peer(dtype, Path(folder))
        prompt_ids = engine.tokenizer.encode(PROMPT)
        for batch in (1, 8):
            runs = {
                "pluglm": lambda batch=batch: time_ours(engine, prompt_ids, batch, options.tokens),
                "transformers": lambda batch=batch: time_peer(peer, prompt_ids, batch, options.tokens),
            }
            speeds = interleave(runs, options.rounds)
            medians = {name: statistics.median(values) for name, values in speeds.items()}
            ratio = medians["pluglm"] / medians["transformers"]
            ours, theirs = (f"{name} {speed:.1f} tok/s" for name, speed in medians.items())
            print(f"batch {batch}: {ours}, {theirs}, ratio {ratio:.2f}")
            results.append({"batch": batch, "tokens_per_s": speeds, "median": medians, "ratio": ratio})
    record = {
        "benchmark": "decode",
        "model": "smollm2-135m-instruct",
        "dtype": options.dtype,
        "threads": options.threads,
        "new_tokens": options.tokens,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
        "results": results,
    }
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {options.record}")


if __name__ == "__main__":
    main()
