"""The driver's side of a worker: starts it, asks it, ends it. Knows no benchmark."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LOAD_SECONDS, ANSWER_SECONDS = 900.0, 300.0


class WorkerError(Exception):
    """A worker failed, was too slow or is gone; the text is the reason, one line."""


class Worker:
    """A process that answers one JSON line with one JSON line (`peers.serving`); what it prints goes to `log`."""

    def __init__(self, command: list[str], variables: Mapping[str, str], log: Path) -> None:
        """Starts it and waits until the model is loaded. Raises WorkerError."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0
            )
        self._log = log
        try:
            self.load_seconds = float(self._read(LOAD_SECONDS)["ready"])
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply. Raises WorkerError when it is an error, or none comes."""
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise WorkerError(f"it ended ({self._last_words()})") from error
        return self._read(ANSWER_SECONDS)

    def idle_share(self, seconds: float = 0.3) -> float:
        """CPU time over `seconds` of waiting, in cores: a peer that spins slows whoever is measured."""
        before = self._cpu_seconds()
        time.sleep(seconds)
        return (self._cpu_seconds() - before) / seconds

    def close(self) -> None:
        """Ends the process, by force if it does not end with its input."""
        self._stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    @property
    def _stdout(self) -> Any:
        return self._process.stdout

    def _read(self, seconds: float) -> dict[str, Any]:
        line, ends_at = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._stdout], [], [], max(0.0, ends_at - time.monotonic()))
            if not ready:
                self._process.kill()  # it would go on working while others are measured
                raise WorkerError(f"no answer in {seconds:.0f} s")
            part = self._stdout.readline()
            if not part:
                raise WorkerError(f"it ended ({self._last_words()})")
            line += part
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None  # it only closed its output
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"exit code {code}: {lines[-1][:300] if lines else 'it printed nothing'}"

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
