"""Calls into plugins under the guard: one thread for a whole generator, another one when a call hangs in it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from pluglm.kernel.errors import ComponentFailure, RequestError
from pluglm.kernel.guard import Guard, Guarded, Watched


@pytest.fixture
def guard() -> Iterator[Guard]:
    made = Guard(timeout_s=0.2)
    yield made
    made.close()


def wait_settled(guard: Guard) -> None:
    deadline = time.monotonic() + 10
    while not guard.settled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert guard.settled


def test_calls_and_the_code_between_them_share_one_thread(guard: Guard) -> None:
    def steps() -> Guarded[list[int]]:
        first = yield "a", threading.get_ident
        between = threading.get_ident()
        second = yield "b", threading.get_ident
        return [first, between, second]

    seen = {*guard.run(steps()), *guard.run(steps())}
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_a_failed_call_raises_in_the_generator_which_goes_on(guard: Guard) -> None:
    def steps() -> Guarded[tuple[ComponentFailure, int]]:
        with pytest.raises(ComponentFailure) as failed:
            yield "sampler 'x'", lambda: [][0]
        return failed.value, (yield "b", lambda: 3)

    failure, result = guard.run(steps())
    assert str(failure) == "sampler 'x' raised IndexError: list index out of range"
    assert isinstance(failure.__cause__, IndexError)
    assert result == 3


def test_errors_of_the_code_between_and_requests_come_back_as_they_are(guard: Guard) -> None:
    def steps() -> Guarded[None]:
        yield "a", int
        raise KeyError("mine")

    def refuse() -> None:
        raise RequestError("refused")

    with pytest.raises(KeyError, match="mine"):
        guard.run(steps())
    with pytest.raises(RequestError, match="refused"):
        guard.call("a", refuse)


def test_a_hang_is_given_up_by_its_name_and_the_generator_goes_on_upon_another_thread(guard: Guard) -> None:
    wakes = threading.Event()
    late: list[str] = []

    def hang() -> None:
        wakes.wait(20)
        late.append("back")

    def steps() -> Guarded[tuple[int, str, int]]:
        first = yield "a", threading.get_ident
        with pytest.raises(ComponentFailure) as failed:
            yield "b", hang
        return first, str(failed.value), (yield "c", threading.get_ident)

    first, said, second = guard.run(steps())
    assert said == "b gave no answer within 0.2 s and was abandoned"
    assert first != second
    assert not guard.settled
    wakes.set()
    wait_settled(guard)
    assert late == ["back"]
    assert guard.call("d", lambda: 3) == 3


def test_every_call_has_the_whole_time_to_itself(guard: Guard) -> None:
    def steps() -> Guarded[int]:
        total = 0
        for _ in range(4):
            yield "a", partial(time.sleep, 0.12)
            total += 1
        return total

    assert guard.run(steps()) == 4
    assert guard.settled


def test_the_code_between_may_call_too_and_a_hang_in_there_costs_no_other_thread(guard: Guard) -> None:
    def steps() -> Guarded[list[object]]:
        before = threading.get_ident()
        with pytest.raises(ComponentFailure, match="inner gave no answer"):
            guard.call("inner", lambda: time.sleep(0.5))
        return [before == threading.get_ident(), (yield "a", lambda: 1)]

    assert guard.run(steps()) == [True, 1]
    wait_settled(guard)


def test_the_innermost_watched_component_is_named(guard: Guard) -> None:
    watched = Watched({"a": 1}, guard, "kv 'x'")
    with pytest.raises(ComponentFailure, match=r"kv 'x' raised TypeError"):
        guard.call("scheduler 'y'", lambda: watched.pop())
    with pytest.raises(ComponentFailure, match=r"scheduler 'y' raised KeyError"):
        guard.call("scheduler 'y'", lambda: {}[watched.get("a")])


def test_an_interrupt_of_the_caller_ends_the_generator_where_it_stands(guard: Guard) -> None:
    """As Ctrl-C does. The call that ran is not waited for; what it may still write to is kept from others."""
    wakes, caller = threading.Event(), threading.get_ident()
    ended: list[type[BaseException]] = []

    def interrupt() -> None:
        signal.pthread_kill(caller, signal.SIGINT)
        wakes.wait(20)

    def steps() -> Guarded[None]:
        try:
            yield "a", interrupt
        except BaseException as error:
            ended.append(type(error))
            raise

    slow = Guard(timeout_s=20)
    with pytest.raises(KeyboardInterrupt):
        slow.run(steps())
    assert ended == [KeyboardInterrupt]
    assert not slow.settled
    wakes.set()
    wait_settled(slow)
    slow.close()


def test_an_interrupt_just_after_the_end_neither_hangs_nor_costs_the_thread(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the caller has taken the worker's word that it is done, and nothing will say so again."""
    first = guard.call("a", threading.get_ident)
    is_done = guard._is_done

    def interrupted(errand: object) -> bool:
        is_done(errand)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(guard, "_is_done", interrupted)
        with pytest.raises(KeyboardInterrupt):
            guard.call("a", int)
    assert guard.call("a", threading.get_ident) == first


def test_a_second_interrupt_waits_until_the_engine_stands_still(guard: Guard) -> None:
    """While the code between the calls waits for a call of its own, nobody may run another generator."""
    began, events, caller = threading.Event(), list[str](), threading.get_ident()

    def nested() -> None:
        began.set()
        time.sleep(0.15)
        events.append("nested is back")

    def steps() -> Guarded[None]:
        yield "a", int
        try:
            guard.call("b", nested)
            yield "c", partial(events.append, "went on")
        finally:
            events.append("stopped")

    def interrupt() -> None:
        began.wait()
        for _ in range(2):
            time.sleep(0.03)
            signal.pthread_kill(caller, signal.SIGINT)

    main_handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            guard.run(steps())
    finally:
        sender.join()
        signal.signal(signal.SIGINT, main_handler)
    assert events == ["nested is back", "stopped"]
    assert guard.call("d", lambda: 4) == 4
