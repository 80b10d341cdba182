"""Peak memory of loading the default model into bfloat16, against weights x 1.3 + 300 MB.

    python benchmarks/load_memory.py [--model smollm2-135m-instruct] [--record FILE.json]

The load runs in a process of its own; its peak resident memory (VmHWM, Python and torch included) is read before it
ends. Prints the numbers and writes a JSON record; exits 1 when the bound is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MB = 1 << 20
CHILD = """
import json, sys
from pathlib import Path
from pluglm import Engine, RunConfig

def status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key + ":"))
    return int(line.split()[1]) * 1024

import torch
imported = status("VmRSS")
with Engine.from_config(RunConfig.from_dict({"model": {"path": sys.argv[1], "dtype": "bfloat16"}})):
    print(json.dumps({"imports": imported, "loaded": status("VmRSS"), "peak": status("VmHWM")}))
"""


def weight_bytes(model: str) -> int:
    """Bytes of the checkpoint's tensors in bfloat16 (a tied head is stored once)."""
    from pluglm.weights.open import open_checkpoint
    from pluglm.weights.resolve import resolve_model

    checkpoint = open_checkpoint(resolve_model(model))
    total = 0
    for name in checkpoint.names():
        count = 2
        for size in checkpoint.shape(name) or ():
            count *= size
        total += count
    checkpoint.close()
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--record", type=Path, default=Path("benchmarks/records/load_memory.json"))
    options = parser.parse_args()
    run = subprocess.run([sys.executable, "-c", CHILD, options.model], check=True, capture_output=True, text=True)
    measured = json.loads(run.stdout)
    weights = weight_bytes(options.model)
    bound = int(weights * 1.3) + 300 * MB
    for name, value in {"weights": weights, **measured, "bound": bound}.items():
        print(f"{name:8} {value / MB:8.1f} MB")
    record = {"benchmark": "load_memory", "model": options.model, "weights": weights, **measured, "bound": bound}
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    print(f"peak is {measured['peak'] / bound:.2f} of the bound; record: {options.record}")
    return int(measured["peak"] > bound)


if __name__ == "__main__":
    sys.exit(main())
