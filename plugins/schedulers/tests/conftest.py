"""Engines on the fake backend, for whole runs of a scheduler: a shape and a tokenizer on disk, no weights read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pluglm import Engine, RunConfig


@pytest.fixture(scope="session")
def shape_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("shape")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def make_engine(shape_only: Path) -> Callable[..., Engine]:
    """A fake engine under a scheduler, with blocks of 4 tokens and steps of 10 ms."""

    def make(
        scheduler: Any, *, seats: int = 4, step_tokens: int = 64, num_blocks: int | None = None, **slots: Any
    ) -> Engine:
        data = {
            "model": {"path": str(shape_only), "dtype": "float32"},
            "backend": {"use": "fake", "step_base_s": 0.01, "token_s": 0.0},
            "kv": {"use": "paged", "block_size": 4, "num_blocks": num_blocks},
            "engine": {"max_num_seqs": seats, "max_step_tokens": step_tokens},
            "scheduler": scheduler,
            **slots,
        }
        return Engine.from_config(RunConfig.from_dict(data))

    return make
