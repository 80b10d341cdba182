"""The public Engine: prompts in, text out; one engine loop behind library, command line and async callers."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from pluglm.arguments import Options, Params, as_list, check_types, checked, params_list, silent
from pluglm.assembly.building import build
from pluglm.assembly.memory_plan import MemoryPlan, PlanShown, unseen
from pluglm.assembly.resolving import ResolvedRun, resolve
from pluglm.assembly.run_config import RunConfig
from pluglm.assembly.services import default_services
from pluglm.asynchronous import each, on_thread
from pluglm.extras import Extras, require_streamable
from pluglm.kernel.core import Event, Request
from pluglm.kernel.engine import EngineCore
from pluglm.kernel.errors import ComponentFailure, RequestError, TokenizerError
from pluglm.kernel.interfaces.kernels import KernelChoice, KernelReport
from pluglm.kernel.interfaces.services import Progress
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.kv import files
from pluglm.kv.files import LoadedKV, SavedKV
from pluglm.kv.tier_set import TierCounts
from pluglm.outputs import Prompt, RequestOutput, StreamChunk
from pluglm.params import for_kernel
from pluglm.prompts import prompt_token_ids
from pluglm.text.tokenizer import Tokenizer

WORKER_THREAD = "pluglm-worker"  # the name of the kernel's threads that run plugins
ChunkStream = Generator[StreamChunk, None, None]


class Engine:
    """Runs one model. Thread-safe: callers share the loop, and whoever waits drives it. Close it, or use `with`.

    memory_plan: made before the weights were read; None where a component does not say what it takes.
    """

    def __init__(self, config: RunConfig, *, progress: Progress = silent, planned: PlanShown = unseen) -> None:
        """Resolve, build and load. Raises a PluglmError of one line for anything that is wrong with the config.

        planned: called with the memory plan before weights are read, unless there is none.
        """
        self.run: ResolvedRun = resolve(config)
        self.memory_plan: MemoryPlan | None = None

        def keep(plan: MemoryPlan) -> None:
            self.memory_plan = plan
            planned(plan)

        parts = build(self.run, default_services(), progress, keep)
        self._extras = Extras(parts)
        self._core = EngineCore(replace(parts, runner=self._extras.runner))
        self._lock = threading.RLock()
        self._inboxes: dict[str, list[Event]] = {}
        self._numbers = count()  # of request ids
        self._closed = self._hooks_may_run = False
        self._to_cancel: list[str] = []  # asked for while a step was on its way
        self._dropped: deque[str] = deque()  # nobody reads these any more
        self._process = os.getpid()
        self._depth = 0  # blocks of _turn that the lock's owner is inside of
        self._core.parts.hooks.call("run_started", plan=self.run.plan())

    @classmethod
    def from_config(cls, config: RunConfig | Mapping[str, Any] | str | Path, *, progress: Progress = silent) -> Self:
        """From a RunConfig, a dictionary of the same shape, or the path of a YAML file."""
        if isinstance(config, str | Path):
            config = RunConfig.from_file(config)
        elif not isinstance(config, RunConfig):
            config = RunConfig.from_dict(config)
        return cls(config, progress=progress)

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def kernels(self) -> tuple[KernelChoice, ...]:
        """Which kernel computes what, and why no better one. Empty where the backend reports none."""
        backend = self._core.parts.runner.backend
        return tuple(backend.kernels.choices) if isinstance(backend, KernelReport) else ()

    @property
    def core(self) -> EngineCore:
        """The engine loop, for tools that measure or replay it. Not thread-safe; whoever steps it gets the events."""
        return self._core

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model: encode, decode, vocab_size, eos_token_ids."""
        return cast(Tokenizer, self._core.parts.tokenizer)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
        salt: str = "",
    ) -> str:
        """Queue one request and return its id; read it with `events`. Raises RequestError when it is refused.

        deadline_s: seconds from now, after which it ends with `deadline`. salt: only requests of the same salt share
        cached prefixes.
        """
        require_streamable(params or self.run.config.sampling, is_stream=False)
        options = Options(priority=priority, tenant=tenant, deadline_s=deadline_s, salt=salt)
        return self._submit(prompt, params, request_id, options).request_id

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, options: Options
    ) -> Request:
        with self._turn():
            self._check_open()
            self._cancel_dropped()
            params = params or self.run.config.sampling
            check_types(params, request_id, options)
            params = checked(params)
            token_ids = prompt_token_ids(prompt, self.tokenizer)
            if request_id is None:
                request_id = self._new_id()
            elif request_id in self._inboxes:
                raise RequestError(
                    f"request '{request_id}': this id is in use until its events are read; choose another"
                )
            asked, options = for_kernel(params, self.tokenizer), self._extras.options(params, options)
            with self._running_hooks():
                request = self._core.add(request_id, token_ids, asked, **options._asdict())
            self._inboxes[request_id] = []
            self._extras.enter(request, self._core.roster, prompt, params)
            return request

    def _new_id(self) -> str:
        return next(name for number in self._numbers if (name := f"request-{number}") not in self._inboxes)

    def cancel(self, request_id: str) -> bool:
        """End a request; its last event has finish_reason `cancelled`. False when it is not running."""
        if self._hooks_may_run:  # a hook asks from the worker thread, while this engine's caller holds the lock
            self._to_cancel.append(request_id)
            return self._core.is_live(request_id)
        with self._turn():
            return self._core.cancel(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; requests that run keep theirs. Does nothing where the KV manager caches none."""
        with self._turn():
            self._check_open()
            self._core.memory.reset_cache()
            self._core.parts.tiers.reset(self._core)

    @property
    def kv_tiers(self) -> Mapping[str, TierCounts]:
        """How many blocks each KV tier has stored and loaded so far, and how many came to nothing."""
        return cast(Mapping[str, TierCounts], self._core.parts.tiers.counts)

    def save_kv(self, prompt: Prompt, path: str | Path, *, salt: str = "") -> SavedKV:
        """Write the KV of the prompt's longest cached prefix to a file, for load_kv in this or another process.

        Raises RequestError when nothing of it is cached, the KV manager caches no prefixes or the file is not written.
        """
        with self._turn():
            self._check_open()
            return files.save_kv(self._core, prompt_token_ids(prompt, self.tokenizer), path, salt)

    def load_kv(self, path: str | Path, *, salt: str = "") -> LoadedKV:
        """Make saved KV adoptable by later requests of that salt. A file that does not fit this run is a miss:

        num_tokens is 0, reason says why, nothing has changed. Raises RequestError where the manager caches no prefixes.
        """
        with self._turn():
            self._check_open()
            return files.load_kv(self._core, path, salt)

    def step(self) -> None:
        """Advance every request once and deliver the events to whoever waits for them."""
        with self._turn():
            self._check_open()
            self._cancel_asked()
            self._cancel_dropped()
            with self._running_hooks():
                self._deliver(self._core.step())
            self._cancel_asked()

    @contextmanager
    def _running_hooks(self) -> Iterator[None]:
        self._hooks_may_run = True
        try:
            yield
        finally:
            self._hooks_may_run = False

    def _cancel_asked(self) -> None:
        while self._to_cancel:
            self._core.cancel(self._to_cancel.pop())

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if (inbox := self._inboxes.get(event.request_id)) is not None:
                inbox.append(self._extras.dressed(event))

    def events(self, request_id: str) -> Iterator[Event]:
        """The events of a request as they come, up to its terminal one. Drives the engine while it waits.

        Raises RequestError when there is no such request, or its events were read already.
        """
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
        with self._turn():
            if not self._inbox(request_id):
                self.step()
            self._inbox(request_id)  # again: another reader may have dropped it
            return self._waiting_events(request_id)

    def _inbox(self, request_id: str) -> list[Event]:
        if (inbox := self._inboxes.get(request_id)) is None:
            raise RequestError(f"request '{request_id}': there is none of this id, or its events were read already")
        return inbox

    def _drop(self, request_id: str) -> None:
        """Nobody reads this request any more: cancel it if it still runs."""
        self._dropped.append(request_id)
        self._settle()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The lock. Requests that are dropped while it is held are cancelled by its owner."""
        if self._is_foreign:
            raise RequestError("this engine was made before this process was forked off; make a new one here")
        try:
            with self._lock:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
        finally:
            self._settle()

    @property
    def _is_foreign(self) -> bool:
        """A fork copies no thread, so nobody would ever do the work, and the lock may be held for good."""
        return os.getpid() != self._process

    def _settle(self) -> None:
        """Cancel what was dropped, if nobody is at work; else whoever is, or comes next, does it.

        The garbage collector closes dropped generators on any thread, also on the worker that the owner of the lock
        waits for. So this never waits for the lock, and leaves the work to others when it is on a worker itself.
        """
        if threading.current_thread().name == WORKER_THREAD or self._is_foreign:
            return
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return
                self._depth += 1
                try:
                    self._cancel_dropped()
                finally:
                    self._depth -= 1
            finally:
                self._lock.release()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self._extras.leave(request_id)
            if self._inboxes.pop(request_id, None) is not None and not self._closed:
                self._core.cancel(request_id)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> ChunkStream:
        """Chunks of a request as they come, options as in submit; leaving the loop cancels it. Raises RequestError."""
        request_id = options.pop("request_id", None)
        require_streamable(params or self.run.config.sampling, is_stream=True)
        chunks = self._chunks(self._submit(prompt, params, request_id, Options(**options)).request_id)
        next(chunks)  # so that it is inside its `finally` even if nobody ever asks for a chunk
        return cast(ChunkStream, chunks)

    def _chunks(self, request_id: str) -> Generator[StreamChunk | None, None, None]:
        """None at once, then the chunks; the request is cancelled when this is closed early."""
        try:
            yield None
            yield from map(self._extras.chunk, self.events(request_id))
        finally:
            self._drop(request_id)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: Progress = silent
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt that cannot run ends `refused` with its reason; the rest go on.

        prompts: a string, {"prompt_token_ids": [...]}, a list of chat messages, or a list of those. params: one for
        all, one each, or None for the config's `sampling`.
        """
        return self._generate(prompts, params, progress, threading.Event())

    def _generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params, progress: Progress, unwanted: threading.Event
    ) -> list[RequestOutput]:
        """generate, given up once `unwanted` is set."""
        todo = as_list(prompts)
        each_params = params_list(params, len(todo), self.run.config.sampling)
        outputs: list[RequestOutput] = []
        try:
            for prompt, one in zip(todo, each_params, strict=True):
                outputs.append(self._start(prompt, one))
            self._finish(outputs, progress, unwanted)
            self._extras.complete(outputs)
        finally:
            for output in outputs:
                if output.seed is not None:  # else it was refused, and its id may be another's by now
                    self._drop(output.request_id)
        return outputs

    def _start(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        request_id = ""
        try:
            with self._turn():
                request_id = self._new_id()
                request = self._submit(prompt, params, request_id, Options())
        except (RequestError, TokenizerError) as error:
            request_id = request_id or self._new_id()  # in a fork there are no turns
            return RequestOutput(request_id, [], finish_reason="refused", error=str(error))
        except ComponentFailure as failure:
            return RequestOutput(request_id, [], finish_reason="error", error=str(failure))
        return RequestOutput(request.request_id, list(request.prompt_token_ids), seed=request.seed)

    def _finish(self, outputs: list[RequestOutput], progress: Progress, unwanted: threading.Event) -> None:
        waiting = [output for output in outputs if output.finish_reason is None]
        progress("generating", len(outputs) - len(waiting), len(outputs))
        while waiting and not unwanted.is_set():
            for output in list(waiting):
                for event in self._waiting_events(output.request_id):
                    output.add(event)
                if output.finish_reason is not None:
                    waiting.remove(output)
                    progress("generating", len(outputs) - len(waiting), len(outputs))
            with self._turn():
                if waiting and not self._closed:  # closing it left the last events to be read
                    self.step()

    def _waiting_events(self, request_id: str) -> list[Event]:
        with self._turn():
            taken, self._inboxes[request_id] = self._inboxes[request_id], []
            return taken

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """generate, without blocking the event loop; cancelling the task cancels the requests."""
        return await on_thread(partial(self._generate, prompts, params, silent))

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[StreamChunk]:
        """stream, without blocking the event loop; closing the iterator cancels the request."""
        return each(partial(self.stream, prompt, params, **options))

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this engine is closed; make a new one")

    def close(self) -> None:
        """Cancel what runs and let go of the model. Safe to call twice; in a fork it does nothing."""
        if self._is_foreign:
            return
        with self._turn():
            if not self._closed:
                self._closed = True
                with self._running_hooks():
                    self._deliver(self._core.close())
                self._extras.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
