"""Where results go: stdout, or a file that is known to be writable before anything is loaded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from pluglm.kernel.errors import ConfigError

# C0 and C1 control characters but for tab and newline, as the visible forms that Unicode has for them
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)} | dict.fromkeys(
    range(0x7F, 0xA0), 0xFFFD
)


class Output:
    """A text stream. On a terminal, control characters in a model's text are shown and not obeyed.

    A file is opened when the results begin, so that a run which fails before leaves the old one alone.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError when `path` cannot be written."""
        self._path = path
        self._file: TextIO | None = None
        if path is not None:
            _check_writable(path)
        elif sys.stdout is None:
            raise ConfigError("standard output is closed; open it, or give --output FILE")

    def __enter__(self) -> Self:
        if self._path is not None:
            try:
                self._file = self._path.open("w", encoding="utf-8", errors="replace")
            except OSError as error:
                raise _cannot_write(self._path, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._guard(self._file.close)

    def write(self, text: str) -> None:
        """Text as it is, seen at once."""
        if self._file is None:
            _write_stdout(text)
        else:
            file = self._file
            self._guard(lambda: (file.write(text), file.flush()))

    def write_json(self, data: Mapping[str, Any]) -> None:
        """One object, one line; escaped to ASCII where stdout could not say the rest."""
        ascii_only = self._file is None and (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        self.write(json.dumps(data, ensure_ascii=ascii_only, allow_nan=False) + "\n")

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            raise _cannot_write(self._path, error) from error


def _write_stdout(text: str) -> None:
    if sys.stdout.isatty():
        text = text.translate(_VISIBLE)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _check_writable(path: Path) -> None:
    try:
        if path.exists() and not path.is_file():  # a device or a pipe: opening it could wait for a reader
            if path.is_dir() or not os.access(path, os.W_OK):
                raise ConfigError(f"--output {path}: cannot be written: it is a directory or not yours to write")
            return
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path | None, error: OSError) -> ConfigError:
    return ConfigError(f"--output {path}: cannot be written: {error.strerror or error}")
