"""Shared by the tests across plugins: a tiny random model on disk, and throw-away distributions really installed."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.append(str(Path(__file__).parent))  # for the helper modules engine_cases and fault_cases
pytest.register_assert_rewrite("fault_cases")  # else its checks would be gone under `python -O`

CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "a quick brown fox jumps over the lazy dog, again and again",
    '{"name": "Ada", "age": 36, "tags": ["x", "y"]} 0123456789',
    "one two three four five six seven eight nine ten",
]


def write_tokenizer(folder: Path, vocab_size: int = 320) -> int:
    """A byte-level BPE tokenizer with an EOS token, saved as tokenizer.json; returns its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
    )
    return tokenizer.get_vocab_size()


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a random llama checkpoint made by transformers. Weights are large enough for clear argmaxes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(name: str = "tiny", seed: int = 0, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        vocab_size = write_tokenizer(folder)
        shape = {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "vocab_size": vocab_size,
            "bos_token_id": None,
            "eos_token_id": 0,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
        }
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**{**shape, **config})).float().save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model()


def _record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"


def build_wheel(
    folder: Path, name: str, version: str, modules: Mapping[str, str], entry_points: Mapping[str, Mapping[str, str]]
) -> Path:
    """A wheel as PEP 427 lays it out."""
    plain = name.replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    groups = "\n".join(
        f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in points.items())
        for group, points in entry_points.items()
    )
    files = {f"{module}.py": source for module, source in modules.items()}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = groups
    record = [_record_line(path, text.encode()) for path, text in files.items()] + [f"{info}/RECORD,,"]
    wheel = folder / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    return wheel


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Installs a throw-away distribution with pip into a folder of this test, which then is on the import path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def run(
        name: str, modules: Mapping[str, str], entry_points: Mapping[str, Mapping[str, str]], version: str = "1.0"
    ) -> Path:
        wheel = build_wheel(tmp_path, name, version, modules, entry_points)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
        subprocess.run(
            [*command, "--disable-pip-version-check", "--no-compile", str(wheel)], check=True, capture_output=True
        )
        return site

    return run
