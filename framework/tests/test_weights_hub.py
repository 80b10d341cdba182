"""Hub ids: what is asked of huggingface_hub, what is taken from a repository, and the line when there is no network.

The hub itself is replaced by a local folder in the layout of a snapshot; nothing here reaches a network.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.resolve import resolve_model

SAFETENSORS = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
UNWANTED = ["pytorch_model.bin", "modeling_evil.py", "original/consolidated.00.pth", "model-Q4_0.gguf", "weights.pt"]


class FakeHub:
    """A repository of `files`; records the options of each download. `online` False: the hub cannot be reached."""

    def __init__(self, folder: Path, files: list[str], *, online: bool, cached: bool) -> None:
        self.folder, self.files, self.online, self.cached = folder, files, online, cached
        self.calls: list[dict[str, Any]] = []

    def model_info(self, _api: object, _repository: str, *, revision: str | None) -> SimpleNamespace:
        if not self.online:
            raise ConnectionError("no route")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def snapshot_download(self, repository: str, **options: Any) -> str:
        self.calls.append({"repository": repository} | options)
        if not self.online and not self.cached:
            raise LocalEntryNotFoundError("outgoing traffic\nhas been disabled")
        wanted, unwanted = options["allow_patterns"] or ["*"], options["ignore_patterns"]
        for file in self.files:
            if any(fnmatch(file, pattern) for pattern in wanted) and not any(fnmatch(file, p) for p in unwanted):
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / file).touch()
        bar = options["tqdm_class"](total=4, initial=1, desc="Downloading bytes", unit="B")
        bar.update(3)
        bar.close()
        return str(self.folder)


Make = Callable[..., FakeHub]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.chdir(tmp_path)

    def make(files: list[str], *, online: bool = True, cached: bool = False) -> FakeHub:
        fake = FakeHub(tmp_path / "snapshot", files, online=online, cached=cached)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: fake.model_info(*a, **k))
        return fake

    return make


def taken(fake: FakeHub) -> set[str]:
    return {str(path.relative_to(fake.folder)) for path in fake.folder.rglob("*") if path.is_file()}


def test_safetensors_are_taken_and_pickles_and_code_are_not(hub: Make) -> None:
    fake = hub(SAFETENSORS + UNWANTED)
    assert resolve_model("org/model", revision="v1") == fake.folder
    assert taken(fake) == set(SAFETENSORS)
    assert fake.calls[0]["repository"] == "org/model"
    assert fake.calls[0]["revision"] == "v1"


def test_the_only_gguf_file_is_taken(hub: Make) -> None:
    fake = hub(["README.md", "model-Q4_0.gguf", "config.json"])
    assert resolve_model("org/model-GGUF") == fake.folder / "model-Q4_0.gguf"
    assert taken(fake) == {"model-Q4_0.gguf"}


def test_of_several_gguf_files_one_must_be_named(hub: Make) -> None:
    fake = hub(["a-Q4_0.gguf", "deep/a-Q8_0.gguf"])
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files; name one as 'org/model/FILE.gguf': a-Q4_0.gguf, d"):
        resolve_model("org/model")
    assert fake.calls == []
    assert resolve_model("org/model/deep/a-Q8_0.gguf") == fake.folder / "deep/a-Q8_0.gguf"
    assert taken(fake) == {"deep/a-Q8_0.gguf"}


def test_a_repository_of_pickles_is_refused(hub: Make) -> None:
    hub(["config.json", "pytorch_model.bin"])
    with pytest.raises(CheckpointError, match="neither safetensors nor GGUF weights; pickled weights are not read"):
        resolve_model("org/model")


def test_without_network_the_cache_is_used(hub: Make) -> None:
    fake = hub(SAFETENSORS, online=False, cached=True)
    assert resolve_model("org/model") == fake.folder
    assert fake.calls[0]["local_files_only"] is True


def test_without_network_and_cache_the_line_says_what_to_do(hub: Make) -> None:
    hub(SAFETENSORS, online=False)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("org/model", revision="v1")
    expected = "org/model at revision v1: the hub could not be reached and its cache holds no complete copy; "
    assert (
        str(caught.value) == expected + "connect (and unset HF_HUB_OFFLINE), or give the path of a copy on this machine"
    )


def test_progress_is_reported(hub: Make) -> None:
    hub(SAFETENSORS)
    seen: list[tuple[str, int, int]] = []
    resolve_model("org/model", progress=lambda label, done, total: seen.append((label, done, total)))
    assert seen == [("Downloading bytes", 4, 4)]


@pytest.mark.parametrize(
    "name", ["org/..", "a/b/c", "/org/model", "org//model", "-org/model", "org/model/x.bin", "o r/m"]
)
def test_other_names_are_not_sent_to_the_hub(hub: Make, name: str) -> None:
    fake = hub(SAFETENSORS)
    with pytest.raises(CheckpointError):
        resolve_model(name)
    assert fake.calls == []
