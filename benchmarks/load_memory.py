"""Peak resident memory of whole runs against the memory plan that is made before their weights are read.

    python benchmarks/load_memory.py [--case NAME ...] [--record FILE.json]

Each case runs in a process of its own: it loads the model, then runs as many sequences as there are seats, which fill
the KV pool together in steps as large as the config allows. The peak is VmHWM of /proc/self/status, Python and torch
included, so every page of the pool counts. The 1B-shaped checkpoint is random, written to a temporary folder (2 GB)
with the tokenizer of the default model and deleted afterwards. Exits 1 when a peak is not within 10 % of its plan.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from command_line import parser_of, write_record

MIB = 1 << 20
TOLERANCE = 0.10
DEFAULT, LARGE = "smollm2-135m-instruct", "1b-random"
CASES: dict[str, dict[str, Any]] = {
    "default bfloat16": {"model": DEFAULT, "dtype": "bfloat16", "kernels": "auto"},
    "default float32": {"model": DEFAULT, "dtype": "float32", "kernels": "auto"},
    "default bfloat16, kernels torch": {"model": DEFAULT, "dtype": "bfloat16", "kernels": "torch"},
    "1B random bfloat16": {"model": LARGE, "dtype": "bfloat16", "kernels": "auto"},
}
KV_MEMORY = 128 * MIB
SHAPE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def child(model: str, dtype: str, kernels: str) -> dict[str, Any]:
    """The plan and the peak of one run in this process."""
    from pluglm import Engine, RunConfig

    config = RunConfig.from_dict(
        {
            "model": {"path": model, "dtype": dtype},
            "backend": {"use": "cpu", "kernels": kernels},
            "engine": {"kv_memory": KV_MEMORY},
        }
    )
    with Engine.from_config(config) as engine:
        plan = engine.memory_plan
        if plan is None:
            raise SystemExit("this run has no memory plan")
        loaded = status("VmHWM")
        prompts, params = filling_batch(plan, config.engine.max_num_seqs)
        outputs = engine.generate(prompts, params)
        reasons = {output.finish_reason for output in outputs}
        if reasons != {"length"}:
            raise SystemExit(f"the batch ended with {reasons}: {outputs[0].error}")
        kernels_used = {choice.operation: choice.kernel for choice in engine.kernels}
        names = ("process", "weights", "loading", "kv", "workspace", "peak")
        return {
            "plan": {name: getattr(plan, name) for name in names},
            "peak_after_loading": loaded,
            "peak": status("VmHWM"),
            "kernels": kernels_used,
        }


def filling_batch(plan: Any, num_seats: int) -> tuple[list[Any], Any]:
    """A prompt for each seat; together they fill the pool. None ends before the last prompt has been read."""
    from pluglm import SamplingParams

    pool_tokens = plan.num_blocks * plan.block_size
    room = plan.num_blocks // num_seats * plan.block_size
    max_tokens = min(2 * (pool_tokens // plan.step_tokens + 1), room // 2)
    ids = [5 + i % 1000 for i in range(room - max_tokens - 1)]
    prompts = [{"prompt_token_ids": [1000 + seat, *ids]} for seat in range(num_seats)]
    return prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def status(key: str) -> int:
    """Bytes of one line of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


@contextmanager
def large_checkpoint() -> Iterator[Path]:
    """A random model of SHAPE in bfloat16, written tensor by tensor."""
    import torch

    from pluglm.weights.resolve import resolve_model

    with tempfile.TemporaryDirectory(prefix="pluglm-1b-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        write_tokenizer(folder, resolve_model(DEFAULT))
        shapes, header, position = tensor_shapes(), dict[str, Any](), 0
        for tensor, shape in shapes.items():
            end = position + 2 * prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
            position = end
        text = json.dumps(header).encode()
        with open(folder / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for shape in shapes.values():
                values = torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.03, 0.03)
                file.write(memoryview(values.view(torch.int16).numpy()).cast("B"))
        yield folder


def write_tokenizer(folder: Path, source: Path) -> None:
    from pluglm.text.load import load_tokenizer
    from pluglm.weights.open import open_checkpoint

    checkpoint = open_checkpoint(source)
    (folder / "tokenizer.json").write_text(load_tokenizer(checkpoint).to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    checkpoint.close()


def tensor_shapes() -> dict[str, list[int]]:
    width, inner, vocab = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    key = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    layer = {
        "input_layernorm": [width],
        "self_attn.q_proj": [width, width],
        "self_attn.k_proj": [key, width],
        "self_attn.v_proj": [key, width],
        "self_attn.o_proj": [width, width],
        "post_attention_layernorm": [width],
        "mlp.gate_proj": [inner, width],
        "mlp.up_proj": [inner, width],
        "mlp.down_proj": [width, inner],
    }
    layers = range(SHAPE["num_hidden_layers"])
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in layer.items()}
    ends = {"model.norm.weight": [width], "lm_head.weight": [vocab, width]}
    return {"model.embed_tokens.weight": [vocab, width], **shapes, **ends}


def measure(names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        case = dict(CASES[name])
        if case["model"] == LARGE:
            with large_checkpoint() as folder:
                results[name] = run_child({**case, "model": str(folder)})
        else:
            results[name] = run_child(case)
        show(name, results[name])
    return results


def run_child(case: dict[str, Any]) -> dict[str, Any]:
    run = subprocess.run([sys.executable, __file__, "--child", json.dumps(case)], check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(run.stdout)
    result["ratio"] = result["peak"] / result["plan"]["peak"]
    return result


def show(name: str, result: dict[str, Any]) -> None:
    parts = ", ".join(f"{part} {size / MIB:,.0f}" for part, size in result["plan"].items())
    print(f"{name}: measured {result['peak'] / MIB:,.0f} MiB, {result['ratio']:.3f} of the plan ({parts})")


def main() -> int:
    parser = parser_of(__doc__, "load_memory.json")
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(**json.loads(options.child))))
        return 0
    results = measure(options.case or list(CASES))
    record = {"benchmark": "load_memory", "kv_memory": KV_MEMORY, "tolerance": TOLERANCE, "cases": results}
    write_record(options.record, record)
    return int(any(abs(result["ratio"] - 1) > TOLERANCE for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
