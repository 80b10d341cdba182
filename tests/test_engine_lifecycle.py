"""Every request ends exactly once, whatever is admitted, cancelled or closed when, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, require_idle, vocab_size
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pluglm import Engine, SamplingParams
from pluglm.kernel.core import Event
from pluglm.kernel.errors import RequestError

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 10), st.integers(-2, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=30,
)


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine.from_config(fake_config(tiny_model)) as engine:
        yield engine


class Ledger:
    """All events of a core by request, checked as they come: nothing follows a terminal event."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.ends: dict[str, Event] = {}
        self.tokens: dict[str, list[int]] = {}

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.request_id not in self.ends, "an event after the terminal one"
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event

    def step(self) -> None:
        self.take(self.core.step())
        self.core.kv.audit()


@pytest.mark.parametrize("scheduler", ["fcfs", {"use": "priority", "ageing": 0.05}], ids=["fcfs", "priority"])
@pytest.mark.parametrize("drafter", [None, "ngram"])
@given(moves=MOVES, block_size=st.sampled_from([1, 3, 16]), step_tokens=st.sampled_from([1, 5, 64]))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_terminal_event_each(
    tiny_model: Path, scheduler: Any, drafter: str | None, moves: list[Any], block_size: int, step_tokens: int
) -> None:
    """Expected tokens: the documented hash of the fake backend, cut where the request was cancelled."""
    config = fake_config(
        tiny_model,
        scheduler=scheduler,
        drafter=drafter,
        kv={"use": "paged", "block_size": block_size, "num_blocks": -(-40 // block_size)},
        engine={"max_num_seqs": 3, "max_step_tokens": step_tokens},
    )
    with Engine.from_config(config) as engine:
        core = engine._core
        ledger, asked = Ledger(core), dict[str, tuple[list[int], int]]()
        for kind, *numbers in moves:
            if kind == "add":
                name, prompt = f"r{len(asked)}", [(7 * len(asked) + i) % 50 for i in range(numbers[0])]
                params = SamplingParams(temperature=0, max_tokens=numbers[1], ignore_eos=True)
                core.add(name, prompt, params, priority=numbers[2])
                asked[name] = (prompt, numbers[1])
            elif kind == "cancel":
                name = f"r{numbers[0]}"
                assert core.cancel(name) == (name in asked and name not in ledger.ends)
                ledger.take(core.step())
            else:
                for _ in range(numbers[0]):
                    ledger.step()
        for _ in range(2000):
            if len(ledger.ends) == len(asked):
                break
            ledger.step()
        assert ledger.ends.keys() == asked.keys()
        size = vocab_size(engine)
        for name, (prompt, count) in asked.items():
            got, expected = ledger.tokens[name], fake_tokens(prompt, count, size)
            assert got == expected[: len(got)]
            assert ledger.ends[name].finish_reason in ("length", "cancelled")
            assert len(got) == count or ledger.ends[name].finish_reason == "cancelled"
        require_idle(engine)


def test_cancel_while_waiting_prefilling_decoding_and_after_the_end(tiny_model: Path) -> None:
    config = fake_config(tiny_model, engine={"max_num_seqs": 1, "max_step_tokens": 4})
    with Engine.from_config(config) as engine:
        prompt = ids(*range(10))
        prefilling, waiting = engine.submit(prompt, GREEDY), engine.submit(prompt, GREEDY)
        assert engine.cancel(waiting)
        engine.step()
        assert engine._core.kv.capacity().held_blocks > 0
        assert engine.cancel(prefilling)
        assert engine._core.kv.capacity().held_blocks == 0
        decoding = engine.submit(prompt, GREEDY)
        for _ in range(4):
            engine.step()
        assert engine.cancel(decoding)
        assert not engine.cancel(decoding)
        for name, count in ((waiting, 0), (prefilling, 0), (decoding, 2)):
            events = list(engine.events(name))
            assert [event.finish_reason for event in events].count("cancelled") == 1
            assert events[-1].finish_reason == "cancelled"
            assert events[-1].metrics is not None
            assert sum(len(event.token_ids) for event in events) == events[-1].metrics.num_output_tokens == count
        done = engine.submit(prompt, GREEDY)
        assert list(engine.events(done))[-1].finish_reason == "length"
        assert not engine.cancel(done)
        assert not engine.cancel("never seen")
        require_idle(engine)


def test_leaving_a_stream_early_cancels_it(engine: Engine) -> None:
    for chunk in engine.stream(ids(1, 2, 3), GREEDY):
        assert chunk.token_ids
        break
    gc.collect()
    engine.step()
    require_idle(engine)


def test_a_stream_that_nobody_reads_is_cancelled_too(engine: Engine) -> None:
    stream = engine.stream(ids(1, 2, 3), GREEDY)
    del stream
    gc.collect()
    engine.step()
    require_idle(engine)


def test_cancelling_from_a_hook_waits_for_the_end_of_the_step(tiny_model: Path, tmp_path: Path) -> None:
    """A hook runs inside the step; its cancel must not pull the step's own sequences away."""
    source = """
        from pluglm.kernel.hooks import Hook, hookimpl
        class Watcher(Hook):
            interface_version = 1
            def __init__(self, config): pass
            @hookimpl
            def step_planned(self, view, plan): self.act(view)
    """
    (tmp_path / "watcher.py").write_text("\n".join(line[8:] for line in source.splitlines()))
    with Engine.from_config(fake_config(tiny_model, tmp_path, hooks=["watcher:Watcher"])) as engine:
        (hook,) = (plugin for _, plugin in engine._core.parts.hooks._manager.list_name_plugin())  # type: ignore[attr-defined]
        answers: list[bool] = []
        hook.act = lambda view: answers.append(engine.cancel("mine"))
        engine.submit(ids(1, 2), GREEDY, request_id="mine")
        events = list(engine.events("mine"))
        assert answers[0]
        assert events[-1].finish_reason == "cancelled"
        require_idle(engine)


def test_close_with_live_requests_ends_them(tiny_model: Path) -> None:
    before = set(threading.enumerate())  # engines of earlier tests that only garbage keeps may still have theirs
    engine = Engine.from_config(fake_config(tiny_model))
    workers = [thread for thread in threading.enumerate() if thread.name == "pluglm-worker" and thread not in before]
    running, waiting = engine.submit(ids(1, 2, 3), GREEDY), engine.stream(ids(4), GREEDY)
    engine.step()
    engine.close()
    engine.close()
    events = list(engine.events(running))
    assert [event.finish_reason for event in events] == [None, "cancelled"]
    assert [chunk.finish_reason for chunk in waiting][-1] == "cancelled"
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive()
    for use in (
        lambda: engine.submit("x"),
        lambda: engine.stream("x"),
        lambda: engine.step(),
        lambda: list(engine.events(running)),
    ):
        with pytest.raises(RequestError):
            use()
    assert engine.generate("x")[0].finish_reason == "refused"
    assert not engine.cancel(running)
    require_idle(engine)


def test_hooks_see_the_end_of_every_request_when_the_engine_closes(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    hook = {"use": "events", "path": str(path)}
    with Engine.from_config(fake_config(tiny_model, hooks=[hook])) as engine:
        engine.submit(ids(1), GREEDY)
        engine.submit(ids(2), GREEDY)
        engine.step()
    text = path.read_text()
    assert text.count('"cancelled"') == 2


def test_a_live_id_is_refused_and_a_read_one_may_come_back(engine: Engine) -> None:
    engine.submit(ids(1), GREEDY, request_id="a")
    with pytest.raises(RequestError, match="'a'"):
        engine.submit(ids(2), GREEDY, request_id="a")
    for _ in range(20):
        engine.step()
    with pytest.raises(RequestError, match="until its events are read"):
        engine.submit(ids(2), GREEDY, request_id="a")
    first = [token for event in engine.events("a") for token in event.token_ids]
    assert first == fake_tokens([1], 8, vocab_size(engine))
    engine.submit(ids(2), GREEDY, request_id="a")
    assert list(engine.events("a"))[-1].finish_reason == "length"
    with pytest.raises(RequestError, match="'a'"):
        list(engine.events("a"))
    require_idle(engine)


def test_a_chosen_id_never_blocks_an_automatic_one(engine: Engine) -> None:
    engine.submit(ids(1), GREEDY, request_id="request-0")
    output = engine.generate(ids(2), GREEDY)[0]
    assert output.finish_reason == "length"
    engine.cancel("request-0")
    list(engine.events("request-0"))
    require_idle(engine)


def test_two_threads_generate_at_once(engine: Engine) -> None:
    prompts = {name: [[name, i, 3] for i in range(6)] for name in (1, 2, 3)}
    outputs: dict[int, Any] = {}

    def work(name: int) -> None:
        outputs[name] = engine.generate([ids(*prompt) for prompt in prompts[name]], GREEDY)

    threads = [threading.Thread(target=work, args=(name,)) for name in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    size = vocab_size(engine)
    for name, mine in prompts.items():
        assert [output.token_ids for output in outputs[name]] == [fake_tokens(one, 8, size) for one in mine]
    require_idle(engine)


def test_closing_while_another_thread_generates_gives_it_its_outputs(tiny_model: Path) -> None:
    engine = Engine.from_config(fake_config(tiny_model))
    started, outputs = threading.Event(), list[Any]()

    def progress(what: str, done: int, total: int) -> None:
        started.set()

    def work() -> None:
        params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
        outputs.extend(engine.generate([ids(1), ids(2)], params, progress=progress))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(10)
    engine.close()
    thread.join(20)
    assert not thread.is_alive()
    assert [output.finish_reason for output in outputs] == ["cancelled", "cancelled"]
    require_idle(engine)


def test_agenerate_and_astream(engine: Engine) -> None:
    async def stream() -> list[int]:
        return [token async for chunk in engine.astream(ids(4, 5), GREEDY) for token in chunk.token_ids]

    async def main() -> list[Any]:
        return list(await asyncio.gather(engine.agenerate([ids(1), ids(2)], GREEDY), stream(), stream()))

    outputs, first, second = asyncio.run(main())
    size = vocab_size(engine)
    assert [output.token_ids for output in outputs] == [fake_tokens([one], 8, size) for one in (1, 2)]
    assert first == second == fake_tokens([4, 5], 8, size)
    require_idle(engine)


LONG = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)


def settle(engine: Engine) -> None:
    """Thread-pool calls that were cancelled come back by themselves; asyncio.run waited for them."""
    gc.collect()
    engine.step()
    require_idle(engine)


def test_cancelling_the_task_of_agenerate_cancels_its_requests(engine: Engine) -> None:
    async def main() -> None:
        task = asyncio.create_task(engine.agenerate([ids(1), ids(2)], LONG))
        while not engine._inboxes:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    settle(engine)


@pytest.mark.parametrize("num_chunks", [0, 1, 5])
def test_leaving_or_cancelling_astream_cancels_the_request(engine: Engine, num_chunks: int) -> None:
    async def leave() -> None:
        stream = engine.astream(ids(1, 2), LONG)
        for _ in range(num_chunks):
            await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    async def read(seen: list[Any]) -> None:
        async for chunk in engine.astream(ids(1, 2), LONG):
            seen += [chunk]

    async def cancel() -> None:
        seen: list[Any] = []
        task = asyncio.create_task(read(seen))
        while len(seen) < num_chunks:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for act in (leave, cancel):
        asyncio.run(act())
        settle(engine)


def test_priority_and_ageing_order_the_work(tiny_model: Path) -> None:
    """One seat. Strict: the urgent late one preempts. Aged: what waited a whole level longer stays ahead."""

    def order(scheduler: Any) -> list[str]:
        config = fake_config(tiny_model, scheduler=scheduler, engine={"max_num_seqs": 1})
        ends: list[str] = []
        with Engine.from_config(config) as engine:
            core = engine._core
            core.add("early", [1, 2], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), priority=1)
            for _ in range(5):
                core.step()
            core.add("late", [3], GREEDY, priority=0)
            core.add("last", [4], GREEDY, priority=2)
            while len(ends) < 3:
                ends += [event.request_id for event in core.step() if event.finish_reason]
        return ends

    assert order("fcfs") == ["early", "late", "last"]
    assert order("priority") == ["late", "early", "last"]
    assert order({"use": "priority", "ageing": 0.001}) == ["early", "late", "last"]


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("scheduler", ["fcfs", "priority"])
@pytest.mark.parametrize("num_blocks", [6, 7, 9])
def test_preemption_in_a_tiny_pool_changes_no_token(
    tiny_model: Path, scheduler: str, drafter: str | None, num_blocks: int
) -> None:
    config = fake_config(
        tiny_model,
        scheduler=scheduler,
        drafter=drafter,
        kv={"use": "paged", "block_size": 3, "num_blocks": num_blocks},
        engine={"max_step_tokens": 7},
    )
    prompts = [[5, 6, 7, 5, 6, 7], [9], [11, 12, 13], [1, 2, 1, 2, 1, 2, 1, 2]]
    with Engine.from_config(config) as engine:
        outputs = engine.generate([ids(*prompt) for prompt in prompts], GREEDY)
        size = vocab_size(engine)
        assert [output.token_ids for output in outputs] == [fake_tokens(prompt, 8, size) for prompt in prompts]
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
        require_idle(engine)


def test_a_prompt_that_raises_takes_nothing_with_it(engine: Engine) -> None:
    with pytest.raises(RequestError, match="SamplingParams, not dict"):
        engine.generate([ids(1), ids(2)], [GREEDY, {"max_tokens": 3}])  # type: ignore[list-item]
    outputs = engine.generate([ids(1), ids(), ids(2)], GREEDY)
    assert Counter(output.finish_reason for output in outputs) == {"length": 2, "refused": 1}
    assert outputs[1].error is not None
    assert "empty" in outputs[1].error
    require_idle(engine)
