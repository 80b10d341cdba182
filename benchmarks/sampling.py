"""What sampling costs a decode step: fused and step by step, against the model's own time, in one run.

    python benchmarks/sampling.py [--threads 2] [--batch 64] [--rounds 9] [--only CASE] [--record FILE.json]

The default model in bfloat16 decodes a batch of random prompts; its steps are timed (the backend's `execute`) and the
logits of one kept. In turn come a step of the model and, on copies of these logits, a chain with `sampler.fast: auto`
and one with `false`, for rows with 256 tokens in the prompt and 128 to 191 in the output; cases `of ties` are of equal
logits. A figure is a median. `share` is the fused path / the model's step, `ratio` the steps one by one / the fused
path. Both must give the same tokens, or the benchmark fails. The target is for the case `usual`: less than 15 % of the
model's step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

import torch
from command_line import parser_of, surroundings, whole, write_record
from rich.console import Console
from rich.table import Table

from pluglm import Engine, SamplingParams
from pluglm.kernel.core import SampleRow

MODEL = "smollm2-135m-instruct"
PATHS: dict[str, bool | str] = {"auto": "auto", "off": False}  # the values of sampler.fast
PROMPT, WARM_UP, STEPS = 64, 2, 16
TARGET = 0.15
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
TIES: dict[str, dict[str, Any]] = {  # of rows of equal logits
    "top_k of ties": {"top_k": 50},
    "top_p of ties": {"top_p": 0.9},
    "typical_p of ties": {"typical_p": 0.9},
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_p of sure rows": {"temperature": 0.3, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "usual": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, **PENALTIES},
    "penalties": PENALTIES,
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
    "epsilon_cutoff": {"epsilon_cutoff": 3e-4},
    "eta_cutoff": {"eta_cutoff": 3e-4},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "xtc": {"xtc_probability": 0.5},
    "dynamic_temperature": {"dynatemp_low": 0.5, "dynatemp_high": 1.5},
    "dry": {"dry_multiplier": 0.8},
    "top_k, typical_p, eta_cutoff, xtc": {"top_k": 100, "typical_p": 0.9, "eta_cutoff": 3e-4, "xtc_probability": 0.5},
    **TIES,
}


class Decoding:
    """A batch of random prompts that is decoded for as long as it is asked to; each text has STEPS tokens or so."""

    def __init__(self, fast: bool | str, threads: int, batch: int) -> None:
        self._engine = Engine.from_config(config_of(fast, threads, batch))
        self._core: Any = self._engine.core
        self._batch, self._num_batches = batch, 0
        self._times, self._kept = list[float](), list[torch.Tensor]()
        self.sampler = self._core.parts.sampler
        backend = self._core.parts.runner.backend
        backend.execute = timed(backend.execute, self._times)
        sample = self.sampler.sample
        self._sample_kept = lambda logits_RV, rows: sample(keep(logits_RV, self._kept), rows)

    def logits(self) -> torch.Tensor:
        """What the sampler was given in the first step that was timed."""
        return self._kept[0]

    def step(self) -> float:
        """Milliseconds of the model in one step of the whole batch."""
        if not self._core.roster.requests:
            self._begin()
        self._core.step()
        return self._times[-1]

    def _begin(self) -> None:
        prompts = torch.randint(self._engine.tokenizer.vocab_size, (self._batch, PROMPT), generator=seeded()).tolist()
        params = SamplingParams(temperature=0.8, max_tokens=1 + WARM_UP + STEPS, ignore_eos=True, seed=1)
        for index, prompt in enumerate(prompts):
            self._core.add(f"{self._num_batches}-{index}", prompt, params)
        for _ in range(WARM_UP):  # the prompts, and a step after them
            self._core.step()
        if not self._num_batches:
            self.sampler.sample = self._sample_kept
            self._core.step()
            del self.sampler.sample
        self._num_batches += 1

    def close(self) -> None:
        self._engine.close()


def config_of(fast: bool | str, threads: int, batch: int) -> dict[str, Any]:
    limits = {"max_num_seqs": batch, "max_step_tokens": batch * PROMPT, "kv_memory": 512 << 20}
    return {
        "model": {"path": MODEL, "dtype": "bfloat16"},
        "backend": "cpu",
        "sampler": {"use": "chain", "fast": fast},
        "engine": {**limits, "num_threads": threads},
    }


def keep(logits_RV: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    kept[:] = [logits_RV.clone()]
    return logits_RV


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        times.append(1000 * (time.perf_counter() - started))
        return result

    return call


def rows_of(params: Mapping[str, Any], num_rows: int, vocab_size: int) -> list[SampleRow]:
    """Texts of distinct lengths; the params are one object, as those of n outputs of a request are."""
    chosen = SamplingParams.model_validate(dict(params))
    texts = torch.randint(vocab_size, (num_rows, 512), generator=seeded()).tolist()
    return [
        SampleRow(
            params=chosen,
            prompt_token_ids=tuple(text[:256]),
            output_token_ids=text[256 : 384 + index % 64],
            seed=index,
            lane=0,
            position=128 + index % 64,
            memory={},
        )
        for index, text in enumerate(texts)
    ]


def measure(name: str, decodings: Mapping[str, Decoding], rounds: int) -> dict[str, Any]:
    """A step of the model (of the run with `auto`; the other lends its chain), and then each path.

    RuntimeError when the two paths give different tokens.
    """
    times: dict[str, list[float]] = {path: [] for path in PATHS}
    model_ms = [decodings["auto"].step()]
    logits_RV = decodings["auto"].logits()
    given_RV = torch.zeros_like(logits_RV) if name in TIES else logits_RV
    rows = rows_of(CASES[name], *given_RV.shape)
    for _ in range(1 + rounds):
        model_ms.append(decodings["auto"].step())
        tokens = {}
        for path, decoding in decodings.items():
            copied_RV = given_RV.clone()
            with torch.inference_mode():
                tokens[path] = timed(decoding.sampler.sample, times[path])(copied_RV, rows)
        if len({tuple(one) for one in tokens.values()}) > 1:
            raise RuntimeError(f"case {name}: the two paths gave different tokens")
    medians = {path: statistics.median(some[1:]) for path, some in times.items()}
    return {
        "params": CASES[name],
        "model_ms": model_ms,
        "sampling_ms": times,
        "median_ms": medians,
        "ratio": medians["off"] / medians["auto"],
        "share": medians["auto"] / statistics.median(model_ms[1:]),
    }


def table_of(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("case", "fused ms", "by steps ms", "ratio", "share of the model's step")
    for name, one in cases.items():
        verdict = f" (target {TARGET:.0%}: {'met' if one['share'] < TARGET else 'MISSED'})" if name == "usual" else ""
        times = (f"{one['median_ms'][path]:.2f}" for path in PATHS)
        table.add_row(name, *times, f"{one['ratio']:.2f}", f"{one['share']:.1%}{verdict}")
    return table


def main() -> None:
    parser = parser_of(__doc__, "sampling.json")
    parser.add_argument("--threads", type=whole, default=2)
    parser.add_argument("--batch", type=whole, default=64)
    parser.add_argument("--rounds", type=whole, default=9)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with ExitStack() as stack:
        decodings = {
            path: stack.enter_context(closing(Decoding(fast, options.threads, options.batch)))
            for path, fast in PATHS.items()
        }
        cases = {name: measure(name, decodings, options.rounds) for name in options.only}
        vocab_size = decodings["auto"].logits().shape[1]
    model_ms = [some for one in cases.values() for some in one["model_ms"]]
    print(f"a step of the model: {statistics.median(model_ms):.1f} ms, {options.batch} rows")
    Console().print(table_of(cases))
    record = {
        "benchmark": "sampling",
        "model": MODEL,
        "vocab_size": vocab_size,
        "batch": options.batch,
        "prompt": PROMPT,
        "threads": options.threads,
        "target_share": TARGET,
        **surroundings(),
        "cases": cases,
    }
    write_record(options.record, record)


if __name__ == "__main__":
    main()
