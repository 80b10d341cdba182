"""Tiny random models with sliding windows, prompts several windows long, and what the tests of their KV record."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pluglm import Engine, RequestOutput, SamplingParams

WINDOW = 40  # tokens
KINDS: dict[str, tuple[str, ...]] = {
    "gemma3_text": ("sliding_attention", "sliding_attention", "full_attention", "sliding_attention"),
    "mistral": ("sliding_attention",) * 4,
}
LENGTHS = (203, 17, 96)  # of the prompts: five windows and a bit, less than one, more than two
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=50, seed=5, max_tokens=30, ignore_eos=True)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, list[int]]]:
    draw = random.Random(2)
    return [{"prompt_token_ids": [draw.randrange(1, 300) for _ in range(length)]} for length in lengths]


def write_model(folder: Path, family: str, like: Path) -> Path:
    """Four layers made by transformers, with another model's tokenizer. Weights are large enough for clear argmaxes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(like / name, folder)
    config: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 1024,
        "vocab_size": json.loads((like / "config.json").read_text())["vocab_size"],
        "bos_token_id": None,
        "eos_token_id": 0,
        "initializer_range": 0.3,
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    }
    if family == "gemma3_text":
        config |= {"layer_types": list(KINDS[family]), "query_pre_attn_scalar": 12, "pad_token_id": None}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).float().save_pretrained(folder)
    return folder


class Rows:
    """The logits rows that every lane's tokens were drawn from, by prompt, lane and output position."""

    def __init__(self, engine: Engine) -> None:
        self.found: dict[tuple[Any, ...], torch.Tensor] = {}
        drawer: Any = engine._core._drawer
        original: Callable[..., Any] = drawer.draw

        def draw(logits_RV: torch.Tensor, windows: Any) -> Any:
            row = 0
            for window in windows:
                one = window.sequence
                for index in range(len(window.drafts) + 1):
                    key = (one.request.prompt_token_ids, one.lane, one.num_output + index)
                    self.found[key] = logits_RV[row + index].clone()
                row += len(window.drafts) + 1
            return original(logits_RV, windows)

        drawer.draw = draw

    def differing(self, other: Rows) -> list[tuple[int, int, int]]:
        """(prompt length, lane, position) of those rows of `other` that are not here with the same bits."""
        return [
            (len(prompt), lane, position)
            for (prompt, lane, position), row in other.found.items()
            if not torch.equal(self.found.get((prompt, lane, position), torch.empty(0)), row)
        ]


class Holdings:
    """The most blocks of any sequence in each group, over all batches, and in those where it only decoded."""

    def __init__(self, engine: Engine) -> None:
        core = engine._core
        self.groups = core.kv.layout.groups
        self.most = [0] * len(self.groups)
        self.most_decoding = [0] * len(self.groups)
        runner: Any = core.parts.runner
        original: Callable[..., Any] = runner.run

        def run(inputs: Any) -> Any:
            for segment in inputs.segments:
                for index, table in enumerate(core.kv.group_tables(segment.sequence_id)):
                    self.most[index] = max(self.most[index], len(table.blocks))
                    if segment.num_query == 1:
                        self.most_decoding[index] = max(self.most_decoding[index], len(table.blocks))
            return original(inputs)

        runner.run = run


def texts(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    """Token ids by request and lane."""
    return [[tuple(one.token_ids) for one in output.completions] for output in outputs]


def fake_tokens(family: str, prompt: list[int], count: int, vocab_size: int) -> tuple[int, ...]:
    """The greedy tokens by the fake backend's docstrings: a hash of what each window shows, as the layers have them."""
    known = list(prompt)
    windows = dict.fromkeys(WINDOW if kind == "sliding_attention" else None for kind in KINDS[family])
    for _ in range(count):
        pairs = [(token, position) for position, token in enumerate(known)]
        seen = [pair for window in windows for pair in pairs[0 if window is None else -window :]]
        data = b"".join(token.to_bytes(8, "little") + position.to_bytes(8, "little") for token, position in seen)
        known.append(int.from_bytes(hashlib.blake2b(data, digest_size=40).digest()[:8], "little") % vocab_size)
    return tuple(known[len(prompt) :])
