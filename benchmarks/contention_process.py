"""A process that keeps an engine busy in given windows of time, and the parent's side of it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from peers.serving import prompts_of

from pluglm import Engine, SamplingParams

MODEL, SEATS, KV_MEMORY = "smollm2-135m-instruct", 8, 256 << 20
ANSWER_SECONDS, LOAD_SECONDS = 60, 300


class Case(NamedTuple):
    """Requests that are always running: as many as the batch, each begun again when it has its new tokens."""

    name: str
    batch: int
    context: int
    new_tokens: int


class Sample(NamedTuple):
    """Of one process in one window: new tokens/s, and the cores it used."""

    speed: float
    cores: float


def work(requests: Connection, kernels: str, threads: int) -> None:
    """The whole life of a process: a window for every Case that it gets, until that is None."""
    config = {
        "model": {"path": MODEL, "dtype": "bfloat16"},
        "backend": {"use": "cpu", "kernels": kernels},
        "engine": {"num_threads": threads, "max_num_seqs": SEATS, "kv_memory": KV_MEMORY},
    }
    with Engine.from_config(config) as engine:
        requests.send("loaded")
        while case := requests.recv():
            answer_window(Load(engine, case), requests)


def answer_window(load: Load, requests: Connection) -> None:
    """Says that the load runs, gets when the window begins and ends (monotonic clock), answers with its Sample."""
    load.step()
    requests.send("begun")
    begin, end = requests.recv()
    while time.monotonic() < begin:
        load.step()
    num_tokens, started, busy = 0, time.monotonic(), time.process_time()
    while (now := time.monotonic()) < end:
        num_tokens += load.step()
    requests.send(Sample(num_tokens / (now - started), (time.process_time() - busy) / (now - started)))
    load.end()


class Load:
    """The requests of a case in an engine."""

    def __init__(self, engine: Engine, case: Case) -> None:
        prompts = prompts_of(0, case.batch, case.context, engine.tokenizer.vocab_size)
        self._core, self._prompts = engine.core, {str(i): prompt for i, prompt in enumerate(prompts)}
        self._params = SamplingParams(temperature=0.0, max_tokens=case.new_tokens, ignore_eos=True)

    def step(self) -> int:
        """One step of the engine; its new tokens. Raises RuntimeError when a request fails."""
        for name, prompt in self._prompts.items():
            if not self._core.is_live(name):
                self._core.add(name, prompt, self._params)
        events = self._core.step()
        for event in events:
            if event.error is not None:
                raise RuntimeError(event.error)
        return sum(len(event.token_ids) for event in events)

    def end(self) -> None:
        for name in self._prompts:
            self._core.cancel(name)
        self._core.step()


class Busy:
    """The parent's side of one process."""

    def __init__(self, kernels: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, kernels, threads), daemon=True)
        self._process.start()
        theirs.close()  # so that the process's end is seen
        self.answer(LOAD_SECONDS)

    def send(self, request: Any) -> None:
        self._requests.send(request)

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        """Raises RuntimeError when none comes; the process has printed why."""
        try:
            if self._requests.poll(seconds):
                return self._requests.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError("a process ended") from None
        raise RuntimeError(f"a process gave no answer in {seconds} s")

    def close(self) -> None:
        with suppress(OSError):  # it has ended
            self._requests.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def pair(kernels: str, threads: int) -> Iterator[list[Busy]]:
    with ExitStack() as stack:
        processes: list[Busy] = []
        for _ in range(2):
            processes.append(Busy(kernels, threads))
            stack.callback(processes[-1].close)
        yield processes
