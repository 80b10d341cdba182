"""The `events` hook: writes what happens in a run as JSON lines, one object per event, flushed as it happens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TextIO

from pluglm.kernel.core import Event, Request
from pluglm.kernel.errors import ConfigError
from pluglm.kernel.hooks import hookimpl
from pluglm.kernel.interfaces.component import ComponentConfig


class EventsConfig(ComponentConfig):
    """path: the file to write, replaced if it exists. Relative to the working directory."""

    path: Path


class EventsHook:
    """Records admitted requests, emitted tokens and terminal events, with the engine's step times."""

    Config: ClassVar[type[EventsConfig]] = EventsConfig
    interface_version: ClassVar[int] = 1

    def __init__(self, config: EventsConfig) -> None:
        try:
            # a lone surrogate, which UTF-8 has not, becomes the escape that JSON has for it
            self._file: TextIO = config.path.open("w", encoding="utf-8", errors="backslashreplace")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"hooks: events: {config.path} cannot be written: {reason}") from error

    def _write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": kind, **fields}, ensure_ascii=False) + "\n")
        self._file.flush()

    @hookimpl
    def run_started(self, plan: Mapping[str, Any]) -> None:
        self._write("run_started", plan=plan)

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        params = request.params.model_dump(mode="json")
        self._write(
            "request_admitted",
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            seed=request.seed,
            params=params,
        )

    @hookimpl
    def event_emitted(self, event: Event) -> None:
        self._write(
            "finished" if event.finish_reason else "tokens",
            request_id=event.request_id,
            lane=event.lane,
            token_ids=event.token_ids,
            text=event.text,
            finish_reason=event.finish_reason,
            error=event.error,
        )

    @hookimpl
    def step_done(self, step: int, seconds: float, num_tokens: int) -> None:
        self._write("step_done", step=step, seconds=seconds, num_tokens=num_tokens)

    @hookimpl
    def run_finished(self) -> None:
        self._write("run_finished")
        self._file.close()
