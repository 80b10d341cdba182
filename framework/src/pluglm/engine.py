"""The public Engine: prompts in, text out; one engine loop behind library, command line and async callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pluglm.assembly.building import build
from pluglm.assembly.resolving import ResolvedRun, resolve
from pluglm.assembly.run_config import RunConfig
from pluglm.assembly.services import default_services
from pluglm.kernel.core import Event, Request
from pluglm.kernel.engine import EngineCore
from pluglm.kernel.errors import ComponentFailure, RequestError, TokenizerError
from pluglm.kernel.interfaces.services import Progress
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.outputs import Prompt, RequestOutput, StreamChunk
from pluglm.prompts import prompt_token_ids

Params = SamplingParams | Sequence[SamplingParams] | None


def _silent(what: str, done: int, total: int) -> None:
    """Progress that nobody asked to see."""


class Engine:
    """Runs one model. Thread-safe: callers share the loop, and whoever waits drives it. Close it, or use `with`."""

    def __init__(self, config: RunConfig, *, progress: Progress = _silent) -> None:
        """Resolve, build and load. Raises a PluglmError of one line for anything that is wrong with the config."""
        self.run: ResolvedRun = resolve(config)
        self._core = EngineCore(build(self.run, default_services(), progress))
        self._lock = threading.RLock()
        self._outputs: dict[str, RequestOutput] = {}
        self._inboxes: dict[str, list[Event]] = {}
        self._next_id = 0
        self._closed = False
        self._core.parts.hooks.call("run_started", plan=self.run.plan())

    @classmethod
    def from_config(cls, config: RunConfig | Mapping[str, Any] | str | Path, *, progress: Progress = _silent) -> Self:
        """From a RunConfig, a dictionary of the same shape, or the path of a YAML file."""
        if isinstance(config, str | Path):
            config = RunConfig.from_file(config)
        elif not isinstance(config, RunConfig):
            config = RunConfig.from_dict(config)
        return cls(config, progress=progress)

    @property
    def config(self) -> RunConfig:
        return self.run.config  # type: ignore[return-value]  # it was given to __init__ as the public class

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model: encode, decode, vocab_size, eos_token_ids."""
        return self._core.parts.tokenizer

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> str:
        """Queue one request and return its id; read it with `events`. Raises RequestError when it is refused."""
        return self._submit(prompt, params, request_id, priority, tenant).request_id

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int, tenant: str
    ) -> Request:
        with self._lock:
            self._check_open()
            params = params or self.run.config.sampling
            token_ids = prompt_token_ids(prompt, self.tokenizer)
            if request_id is None:
                request_id, self._next_id = f"request-{self._next_id}", self._next_id + 1
            request = self._core.add(request_id, token_ids, params, priority=priority, tenant=tenant)
            self._inboxes[request_id] = []
            return request

    def cancel(self, request_id: str) -> bool:
        """End a request; its last event has finish_reason `cancelled`. False when it is not running."""
        with self._lock:
            return self._core.cancel(request_id)

    def step(self) -> None:
        """Advance every request once and deliver the events to whoever waits for them."""
        with self._lock:
            self._check_open()
            for event in self._core.step():
                if (inbox := self._inboxes.get(event.request_id)) is not None:
                    inbox.append(event)

    def events(self, request_id: str) -> Iterator[Event]:
        """The events of a request as they come, up to its terminal one. Drives the engine while it waits."""
        try:
            while True:
                for event in self._take(request_id):
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            self._drop(request_id)

    def _take(self, request_id: str) -> list[Event]:
        """Waiting events of one request; steps the engine once when there are none."""
        with self._lock:
            inbox = self._inboxes[request_id]
            if not inbox:
                self.step()
            taken, self._inboxes[request_id] = list(inbox), []
            return taken

    def _drop(self, request_id: str) -> None:
        """Nobody reads this request any more: cancel it if it still runs."""
        with self._lock:
            if self._inboxes.pop(request_id, None) is not None and not self._closed:
                self._core.cancel(request_id)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[StreamChunk]:
        """Chunks of one request as they come; leaving the loop early cancels it. Raises RequestError when refused."""
        request_id = self.submit(prompt, params, **options)
        return (_chunk(event) for event in self.events(request_id))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: Progress = _silent
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt that cannot run ends `refused` with its reason; the rest go on.

        prompts: a string, {"prompt_token_ids": [...]}, a list of chat messages, or a list of those. params: one for
        all, one each, or None for the config's `sampling`.
        """
        todo = _as_list(prompts)
        each = _params_list(params, len(todo), self.run.config.sampling)
        outputs = [self._start(prompt, one) for prompt, one in zip(todo, each, strict=True)]
        live = {output.request_id: output for output in outputs if output.finish_reason is None}
        try:
            self._finish(live, progress, len(outputs))
        finally:
            for request_id in live:
                self._drop(request_id)
        return outputs

    def _start(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        try:
            request = self._submit(prompt, params, None, 0, "")
        except (RequestError, TokenizerError) as error:
            return RequestOutput("", [], finish_reason="refused", error=str(error))
        except ComponentFailure as failure:
            return RequestOutput("", [], finish_reason="error", error=str(failure))
        return RequestOutput(request.request_id, list(request.prompt_token_ids), seed=request.seed)

    def _finish(self, live: dict[str, RequestOutput], progress: Progress, total: int) -> None:
        waiting = dict(live)
        progress("generating", total - len(waiting), total)
        while waiting:
            for request_id in list(waiting):
                for event in self._waiting_events(request_id):
                    waiting[request_id].add(event)
                if waiting[request_id].finish_reason is not None:
                    del waiting[request_id]
                    progress("generating", total - len(waiting), total)
            if waiting:
                self.step()

    def _waiting_events(self, request_id: str) -> list[Event]:
        with self._lock:
            taken, self._inboxes[request_id] = self._inboxes[request_id], []
            return taken

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """generate, without blocking the event loop."""
        return await asyncio.to_thread(self.generate, prompts, params)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[StreamChunk]:
        """stream, without blocking the event loop; closing the iterator cancels the request."""
        request_id = await asyncio.to_thread(self.submit, prompt, params, **options)
        try:
            while True:
                for event in await asyncio.to_thread(self._take, request_id):
                    yield _chunk(event)
                    if event.finish_reason is not None:
                        return
        finally:
            self._drop(request_id)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this engine is closed; make a new one")

    def close(self) -> None:
        """Cancel what runs and let go of the model. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chunk(event: Event) -> StreamChunk:
    return StreamChunk(event.request_id, event.text, event.token_ids, event.finish_reason, event.error, event.metrics)


def _as_list(prompts: Any) -> list[Prompt]:
    """A list of prompts from one or many; a list of messages is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many = list(prompts)
    is_chat = bool(many) and all(isinstance(one, Mapping) and "role" in one for one in many)
    return [many] if is_chat else many


def _params_list(params: Params, count: int, default: SamplingParams) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts; give one, or one each")
    return list(params)
