"""Reads ranges of one open file. Knows nothing of formats; every range is checked against the file's size."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from pluglm.weights.messages import damaged, refusal


class ByteSource:
    """One open file, read by explicit ranges.

    Plain reads and not a memory map hand out the bytes: a file cut short under a running process is then an error
    and not a SIGBUS, and the pages read count for the page cache, never for this process.
    Safe to use from several threads.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the file cannot be opened."""
        self.path = path
        try:
            self.size = path.stat().st_size
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise refusal(path, f"cannot be opened: {error.strerror or error}") from error
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._file.fileno()

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `offset`; raises CheckpointError when the range is not all there."""
        filled = 0
        try:
            with self._lock:
                self._file.seek(offset)
                while filled < len(target):
                    got = self._file.readinto(target[filled:])
                    if not got:
                        break
                    filled += got
        except (OSError, ValueError) as error:
            raise refusal(self.path, f"cannot be read at byte {offset}: {error}") from error
        if filled < len(target):
            raise damaged(self.path, f"ends inside the {len(target)} bytes that start at byte {offset}")

    def read(self, offset: int, length: int) -> bytearray:
        """The bytes of one range, as a buffer the caller owns."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise damaged(self.path, f"bytes {offset} to {offset + length} lie outside its {self.size} bytes")
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return buffer

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ByteSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
