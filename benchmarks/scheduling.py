"""Continuous batching, prefix reuse, chunked prefill, the host's time: ratios of interleaved runs in one process.

    python benchmarks/scheduling.py [--only batching prefix chunks host] [--threads 2] [--rounds 5] [--record FILE.json]

batching: 128 long-tailed outputs, `fcfs` against `static_batch`. prefix: 32 prompts that share 512 tokens, KV managers
that reuse them against `paged`. chunks: a 4,000-token prompt beside 8 running requests, prefilled in chunks or whole.
host: milliseconds that scheduler and KV manager take for a step, on the fake backend. The first three run the default
model in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from command_line import parser_of, surroundings, whole, write_record
from scheduling_batching import measure_batching
from scheduling_chunks import measure_chunks
from scheduling_host import measure_host
from scheduling_prefix import measure_prefix

PARTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "batching": measure_batching,
    "prefix": measure_prefix,
    "chunks": measure_chunks,
    "host": measure_host,
}


def main() -> None:
    parser = parser_of(__doc__, "scheduling.json")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--threads", type=whole, default=2)
    parser.add_argument("--rounds", type=whole, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record: dict[str, Any] = {
        "benchmark": "scheduling",
        "model": "smollm2-135m-instruct",
        "dtype": "bfloat16",
        "threads": options.threads,
        **surroundings(),
    }
    for name in options.only:
        print(f"--- {name}")
        record[name] = PARTS[name](options.threads, options.rounds)
    write_record(options.record, record)


if __name__ == "__main__":
    main()
