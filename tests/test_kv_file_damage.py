"""A damaged file of saved KV is a miss with a reason or changes nothing: never a wrong answer, never an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import fake_tokens, ids, require_idle, vocab_size
from kv_file_cases import answer, cached, num_cached, require_miss, resealed, saved

from pluglm import Engine
from pluglm.kv.files import KIND
from pluglm.kv.sealed import SealedFile, seal

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
MANAGERS = ["hash_prefix", "radix"]


@pytest.fixture(params=MANAGERS)
def place(tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Path, list[int]]]:
    """An engine with nothing cached, a file that fits it, and the tokens that the engine has to give."""
    config, path = cached(tiny_model, request.param), tmp_path / "kv"
    expected = saved(config, path)
    with Engine(config) as engine:
        yield engine, path, expected


def judge(engine: Engine, path: Path, expected: list[int]) -> bool:
    """Whether the file hit; a miss must say why, and a hit must not change the answer."""
    loaded = engine.load_kv(path)
    if not loaded.num_tokens:
        require_miss(loaded, path)
        assert engine._core.kv.capacity().cached_blocks == 0
        return False
    assert not loaded.reason
    assert answer(engine).token_ids == expected
    claimed = [*document_of(path)["token_ids"], 7]
    assert answer(engine, ids(*claimed)).token_ids == fake_tokens(claimed, 8, vocab_size(engine))
    engine.reset_prefix_cache()
    return True


def test_any_flipped_byte(place: tuple[Engine, Path, list[int]]) -> None:
    engine, path, expected = place
    data, generator = path.read_bytes(), random.Random(1)
    hits = 0
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        hits += judge(engine, path, expected)
    assert hits < len(data) // 20, "only padding may go unnoticed"
    path.write_bytes(data)
    assert judge(engine, path, expected), "and the whole file is one"
    require_idle(engine)


def test_any_cut(place: tuple[Engine, Path, list[int]]) -> None:
    engine, path, expected = place
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert not judge(engine, path, expected)
    path.write_bytes(data + b"\0")
    assert not judge(engine, path, expected)
    require_idle(engine)


def test_zeroed_and_swapped_regions(place: tuple[Engine, Path, list[int]]) -> None:
    """What a file system leaves of a write that it did not finish."""
    engine, path, expected = place
    data, generator = path.read_bytes(), random.Random(2)
    for _ in range(300):
        start, length = generator.randrange(len(data)), generator.randrange(1, len(data))
        piece = bytes(len(data[start : start + length]))
        if generator.random() < 0.5:
            source = generator.randrange(len(data))
            piece = data[source : source + length]
        path.write_bytes(data[:start] + piece + data[start + len(piece) :])
        judge(engine, path, expected)
    require_idle(engine)


def document_of(path: Path) -> dict[str, Any]:
    return SealedFile(KIND, path.read_bytes()).document


def changes(document: dict[str, Any]) -> dict[str, Change]:
    """One for each field of the header, each with checksums that fit, as a faulty writer would make them."""
    wrong: dict[str, Any] = {
        "num_prompt": [21, "21", True],
        "salt_key": ["0" * 64, "0" * 63, "x" * 64, "0" * 130, 7],
        "salt": ["0" * 64, "", None],
        "token_ids": [[], [40], [*range(40, 60), -1], [*range(40, 60), 10**6], list(range(40, 100)), ["40"] * 20, None],
        "fields": [{}, None],
    }
    found: dict[str, Change] = {}
    for name, values in wrong.items():
        for value in values:
            found[f"{name}={value!r:.20}"] = lambda doc, _, name=name, value=value: doc.update({name: value})
        found[f"no {name}"] = lambda doc, _, name=name: doc.pop(name)
    for name, value in document["fields"].items():
        found[f"fields.{name}"] = lambda doc, _, name=name, value=value: doc["fields"].update({name: f"{value}."})
        found[f"no fields.{name}"] = lambda doc, _, name=name: doc["fields"].pop(name)
    found["one more field"] = lambda doc, _: doc["fields"].update(adapter="none")
    found["one more key"] = lambda doc, _: doc.update(adapter="none")
    found["one tensor less"] = lambda _, tensors: tensors.pop("keys.1")
    found["one tensor more"] = lambda _, tensors: tensors.update({"keys.2": tensors["keys.1"].clone()})
    found["another name"] = lambda _, tensors: tensors.update({"keys.9": tensors.pop("keys.1")})
    found["another type"] = lambda _, tensors: tensors.update({"keys.1": tensors["keys.1"].to(torch.int32)})
    found["another shape"] = lambda _, tensors: tensors.update({"keys.1": tensors["keys.1"].view(1, -1, 1).clone()})
    found["tokens without KV"] = lambda _, tensors: tensors.update({n: t[:-1] for n, t in tensors.items()})
    return found


def test_any_header_that_is_not_this_runs(place: tuple[Engine, Path, list[int]]) -> None:
    engine, path, expected = place
    data = path.read_bytes()
    for name, change in changes(document_of(path)).items():
        path.write_bytes(data)
        resealed(path, change)
        require_miss(engine.load_kv(path), path), name
        assert num_cached(answer(engine)) == 0, name
        engine.reset_prefix_cache()
    path.write_bytes(data)
    assert judge(engine, path, expected)
    require_idle(engine)


def test_another_format_is_named(place: tuple[Engine, Path, list[int]]) -> None:
    engine, path, _ = place
    file = SealedFile(KIND, path.read_bytes())
    path.write_bytes(seal("pluglm KV 2", file.document, file.tensors()))
    require_miss(engine.load_kv(path), path, "holds 'pluglm KV 2', and 'pluglm KV 1' is read here")


def test_what_is_no_file_of_saved_kv(place: tuple[Engine, Path, list[int]], tiny_model: Path, tmp_path: Path) -> None:
    engine, _, _ = place
    for path in (tmp_path / "gone", tmp_path, tiny_model / "config.json", tiny_model / "model.safetensors"):
        require_miss(engine.load_kv(path), path)
    (tmp_path / "huge").write_bytes(b"")
    with (tmp_path / "huge").open("r+b") as stream:
        stream.truncate(1 << 40)
    require_miss(engine.load_kv(tmp_path / "huge"), tmp_path / "huge", "is larger than")
    require_idle(engine)
