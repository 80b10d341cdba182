"""Streams that nobody holds any more: the collector may close them on any thread, at any moment, without a deadlock."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, ids, require_idle, write_plugin

from pluglm import Engine
from pluglm.kernel.errors import RequestError

WATCHER = """
from pluglm.kernel.hooks import Hook, hookimpl

class Watcher(Hook):
    interface_version = 1

    def __init__(self, config):
        self.act = lambda: None

    @hookimpl
    def step_planned(self, view, plan):
        self.act()
"""


class _Holder:
    """Holds a stream in a cycle, so that only the cyclic collector can close it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.itself = stream, self


@pytest.fixture
def watched(tiny_model: Path, tmp_path: Path) -> Any:
    """An engine and the hook in it, whose `act` runs on the kernel's worker in the middle of a step."""
    write_plugin(tmp_path, WATCHER, "watcher")
    engine = {"plugin_timeout_s": 20}  # what a deadlock would wait for
    with Engine.from_config(fake_config(tiny_model, tmp_path, hooks=["watcher:Watcher"], engine=engine)) as running:
        (hook,) = (plugin for _, plugin in running._core.parts.hooks._manager.list_name_plugin())  # type: ignore[attr-defined]
        yield running, hook


def test_the_collector_may_close_a_stream_on_the_worker_inside_a_step(watched: tuple[Engine, Any]) -> None:
    engine, hook = watched
    threads: list[str] = []

    def collect() -> None:
        gc.collect()
        threads.append(threading.current_thread().name)

    alone = engine.generate(ids(1, 2, 3), GREEDY)[0]
    gc.disable()
    try:
        holder = _Holder(engine.stream(ids(4, 5), GREEDY))
        next(holder.stream)
        del holder
        hook.act = collect
        output = engine.generate(ids(1, 2, 3), GREEDY)[0]
    finally:
        gc.enable()
    assert len(threads) > 1, "the hook was abandoned in its first call"
    assert threading.current_thread().name not in threads
    assert (output.finish_reason, output.token_ids) == ("length", alone.token_ids)
    engine.step()
    require_idle(engine)


def test_what_is_dropped_while_another_thread_works_is_cancelled_by_it(watched: tuple[Engine, Any]) -> None:
    engine, hook = watched
    inside, go_on = threading.Event(), threading.Event()
    stream = engine.stream(ids(4, 5), GREEDY)
    next(stream)

    waited: list[bool] = []

    def wait() -> None:
        inside.set()
        waited.append(go_on.wait(10))

    hook.act = wait
    worker = threading.Thread(target=engine.generate, args=(ids(1, 2), GREEDY))
    worker.start()
    assert inside.wait(10)
    hook.act = lambda: None
    stream.close()
    go_on.set()
    worker.join(10)
    assert not worker.is_alive()
    assert waited == [True], "closing the stream waited for the step"
    require_idle(engine)


def test_every_reader_of_one_request_comes_to_an_end(watched: tuple[Engine, Any]) -> None:
    engine, _ = watched
    for _ in range(10):
        request_id = engine.submit(ids(1, 2, 3), GREEDY.model_copy(update={"max_tokens": 40}))
        ends: list[str] = []

        def read(request_id: str = request_id, ends: list[str] = ends) -> None:
            try:
                ends.extend(event.finish_reason for event in engine.events(request_id) if event.finish_reason)
            except RequestError:
                ends.append("refused")

        readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(10)
        assert not any(reader.is_alive() for reader in readers)
        assert ends.count("length") <= 1
        require_idle(engine)


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        (lambda engine: engine.submit("a", 3), "params must be SamplingParams, not int"),
        (lambda engine: engine.submit("a", GREEDY, request_id=3), "request_id must be str, not int"),
        (lambda engine: engine.submit("a", GREEDY, priority="high"), "priority must be int, not str"),
        (lambda engine: engine.submit("a", GREEDY, priority=float("nan")), "priority must be int, not float"),
        (lambda engine: engine.submit("a", GREEDY, tenant=3), "tenant must be str, not int"),
        (lambda engine: engine.generate("a", 3), "sampling params must be SamplingParams, not int"),
    ],
)
def test_a_wrong_type_is_refused_at_the_door(
    watched: tuple[Engine, Any], submit: Callable[[Engine], Any], message: str
) -> None:
    engine, _ = watched
    with pytest.raises(RequestError, match=message):
        submit(engine)
    require_idle(engine)


def test_an_engine_from_before_a_fork_says_so(watched: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process has no worker thread, so a call would wait for the plugin timeout."""
    engine, _ = watched
    stream = engine.stream(ids(1, 2), GREEDY)
    with monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: -1)
        for call in (lambda: engine.submit("a"), engine.step, lambda: engine.cancel("x"), lambda: list(stream)):
            with pytest.raises(RequestError, match="made before this process was forked"):
                call()
        (output,) = engine.generate(ids(1, 2), GREEDY)
        assert (output.finish_reason, bool(output.request_id)) == ("refused", True)
        stream.close()
        engine.close()
    assert engine.generate(ids(1, 2), GREEDY)[0].finish_reason == "length"
    require_idle(engine)
