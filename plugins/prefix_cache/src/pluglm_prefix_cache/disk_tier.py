"""A KV tier in a folder: a file a block, found again after a restart. What is damaged or foreign is a miss."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.component import BuildContext, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv_tier import PERSISTENT, KVTier, Lease, LeaseState
from pluglm.kv.sealed import SealedFile, UnreadableFileError, read_bounded, seal, write_whole

KIND = "pluglm KV block 1"
ENDING = ".kvblock"
_NAME = re.compile(r"[0-9a-f]{64}\.kvblock")
_PART = re.compile(r"\.[0-9a-f]{64}\.kvblock\..*\.part")
_OLD_PART_S = 3600.0  # a file that was begun that long ago and not finished never will be


class DiskTierConfig(ComponentConfig):
    """path: the folder, made if there is none, of this model or others. bytes: of all its blocks' files."""

    path: Path
    bytes: int = Field(default=10 << 30, ge=0)


class _Job:
    """A lease on what the tier's thread does."""

    def __init__(self, future: Future[tuple[list[torch.Tensor], float]]) -> None:
        self._future = future
        self.seconds = 0.0
        self.data: Sequence[torch.Tensor] = ()

    def wait(self, timeout_s: float) -> LeaseState:
        wait((self._future,), timeout_s)
        if not self._future.done():
            return "pending"
        if self._future.cancelled() or self._future.exception() is not None:
            return "failed"
        self.data, self.seconds = self._future.result()
        return "ok"

    def cancel(self) -> None:
        self._future.cancel()
        self.data = ()


class DiskTier(KVTier):
    """Evicted KV in files. One thread reads and writes; what was stored or loaded the longest time ago goes first.

    Engines may share a folder: each keeps to its own limit, and a file that another one took away is a miss. Nothing is
    forced to the disk, since a file that a power cut tore is a miss too.
    """

    interface_version = 1
    Config = DiskTierConfig

    def __init__(self, config: DiskTierConfig, context: BuildContext) -> None:
        self._folder, self._most_bytes = config.path, config.bytes
        self._lock = threading.Lock()  # of the two below
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by file name, the longest unused first
        self._num_bytes = 0  # their sum
        self._num_clears = 0
        self._pool: ThreadPoolExecutor | None = None
        try:
            self._find_files()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PluginError(f"kv_tier 'disk': the folder {self._folder} cannot be used: {reason}") from error

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({PERSISTENT}))

    def has(self, key: bytes) -> bool:
        with self._lock:
            return _name(key) in self._sizes

    def store(self, key: bytes, token_ids: Sequence[int], data: Sequence[torch.Tensor]) -> Lease:
        num_clears = self._num_clears
        return self._start(lambda: self._write(_name(key), token_ids, data, num_clears))

    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        return self._start(lambda: self._read(_name(key), token_ids))

    def clear(self) -> None:
        with self._lock:
            names = list(self._sizes)
            self._num_clears += 1
        for name in names:
            self._remove(name)

    def close(self) -> None:
        """What is being written is finished first."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _find_files(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it is not yours to read and write")
        found: list[tuple[float, str, int]] = []
        for file in self._folder.iterdir():
            with suppress(FileNotFoundError):
                state = file.stat()
                if _NAME.fullmatch(file.name) and file.is_file():
                    found.append((state.st_mtime, file.name, state.st_size))
                elif _PART.fullmatch(file.name) and time.time() - state.st_mtime > _OLD_PART_S:
                    file.unlink()
        for _, name, size in sorted(found):
            self._add(name, size)
        self._make_room(0)

    def _start(self, work: Callable[[], list[torch.Tensor]]) -> Lease:
        def timed() -> tuple[list[torch.Tensor], float]:
            started_s = time.perf_counter()
            return work(), time.perf_counter() - started_s

        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="pluglm-disk-tier")
        return _Job(self._pool.submit(timed))

    def _write(
        self, name: str, token_ids: Sequence[int], data: Sequence[torch.Tensor], num_clears: int
    ) -> list[torch.Tensor]:
        file = seal(KIND, {"token_ids": list(token_ids)}, {str(number): one for number, one in enumerate(data)})
        if len(file) > self._most_bytes:
            raise UnreadableFileError("is larger than the tier")
        self._make_room(len(file))
        write_whole(self._folder / name, file, is_durable=False)
        with self._lock:
            self._add(name, len(file))
        if num_clears != self._num_clears:
            self._remove(name)
        return []

    def _add(self, name: str, size: int) -> None:
        self._num_bytes += size - self._sizes.pop(name, 0)
        self._sizes[name] = size

    def _read(self, name: str, token_ids: Sequence[int]) -> list[torch.Tensor]:
        path = self._folder / name
        with self._lock:
            size = self._sizes.get(name)
        if size is None:
            raise UnreadableFileError("is not there")
        try:
            file = SealedFile(KIND, read_bounded(path, size))
            tensors = file.tensors()
        except UnreadableFileError:
            self._remove(name)
            raise
        if file.document != {"token_ids": list(token_ids)}:
            raise UnreadableFileError("holds other tokens")
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        with suppress(OSError):
            os.utime(path)  # its age is what the next run goes by
        return [tensors[str(number)] for number in range(len(tensors))]

    def _make_room(self, num_bytes: int) -> None:
        while True:
            with self._lock:
                if not self._sizes or self._num_bytes + num_bytes <= self._most_bytes:
                    return
                name = next(iter(self._sizes))
            self._remove(name)

    def _remove(self, name: str) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(name, 0)
        with suppress(OSError):
            (self._folder / name).unlink()


def _name(key: bytes) -> str:
    return key.hex() + ENDING
