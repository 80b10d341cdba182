"""Fetches a model from the Hugging Face hub, or finds it in that library's cache. Takes no pickles and no code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pluglm.kernel.errors import CheckpointError, describe
from pluglm.kernel.interfaces.services import Progress
from pluglm.weights.messages import quoted

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w./-]+\.gguf)?")
_WANTED = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "*.jinja"]
_UNWANTED = ["original/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.py", "onnx/*"]
_MOST_SHOWN = 8


def is_hub_id(name: str) -> bool:
    """Whether `name` reads as "org/name", or "org/name/FILE.gguf" for one file of a repository with several."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


def fetch_from_hub(name: str, revision: str | None, progress: Progress | None) -> Path:
    """The folder (safetensors) or file (GGUF) of a hub id, downloaded unless the hub library's cache has it.

    Environment settings of huggingface_hub itself (HF_HUB_OFFLINE, HF_HOME, HF_TOKEN) hold. Raises CheckpointError,
    one line: no network and not cached, no such repository or revision, no access, no readable weights in it.
    """
    repository, file = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    if file:
        return _snapshot(repository, revision, [file], progress) / file
    files = _remote_files(repository, revision)
    if files is None:
        return _weights_in(name, _snapshot(repository, revision, None, progress))
    if any(entry.endswith(".safetensors") for entry in files):
        return _snapshot(repository, revision, _WANTED, progress)
    gguf = _only_gguf(name, [entry for entry in files if entry.endswith(".gguf")])
    return _snapshot(repository, revision, [gguf], progress) / gguf


def _remote_files(repository: str, revision: str | None) -> list[str] | None:
    """What the repository holds; None when the hub cannot be asked, and then the cache is all there is."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        siblings = HfApi().model_info(repository, revision=revision).siblings
    except (GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _hub_error(repository, revision, error) from error
    except Exception:  # offline mode, no route, a proxy, a server error: each HTTP library has its own classes
        return None
    return [sibling.rfilename for sibling in siblings or []]


def _snapshot(repository: str, revision: str | None, wanted: list[str] | None, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=wanted,
            ignore_patterns=_UNWANTED,
            tqdm_class=_bar_class(progress),
            local_files_only=wanted is None,
        )
    except Exception as error:  # as above, and whatever the cache holds
        raise _hub_error(repository, revision, error) from error
    return Path(folder)


def _hub_error(repository: str, revision: str | None, error: Exception) -> CheckpointError:
    from huggingface_hub.errors import LocalEntryNotFoundError

    at = f"{repository}" + (f" at revision {revision}" if revision else "")
    if isinstance(error, LocalEntryNotFoundError):
        fix = "connect (and unset HF_HUB_OFFLINE), or give the path of a copy on this machine"
        return CheckpointError(f"{at}: the hub could not be reached and its cache holds no complete copy; {fix}")
    cause = describe(error)[:300]
    fix = "check the name, the revision and the access of your token (HF_TOKEN)"
    return CheckpointError(f"{at}: cannot be fetched from the hub ({cause}); {fix}")


def _weights_in(name: str, folder: Path) -> Path:
    if any(folder.glob("*.safetensors")):
        return folder
    return folder / _only_gguf(name, [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.gguf"))])


def _only_gguf(name: str, files: list[str]) -> str:
    if len(files) == 1:
        return files[0]
    if not files:
        raise CheckpointError(f"{name}: holds neither safetensors nor GGUF weights; pickled weights are not read")
    shown = ", ".join(files[:_MOST_SHOWN]) + (" ..." if len(files) > _MOST_SHOWN else "")
    raise CheckpointError(f"{name}: holds {len(files)} GGUF files; name one as {quoted(f'{name}/FILE.gguf')}: {shown}")


def _bar_class(progress: Progress | None) -> Any:
    """A progress bar that draws nothing and reports to `progress`."""
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm

    class ReportingBar(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._label = str(options.get("desc") or "")
            super().__init__(*arguments, **(options | {"disable": True}))
            self.n = int(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            if progress is not None:
                progress(self._label, int(self.n), int(self.total or 0))

    return ReportingBar
