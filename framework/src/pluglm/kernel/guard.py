"""Calls into plugins: names the one that raised, gives up on one that hangs, and lets the engine live on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pluglm.kernel.errors import ComponentFailure, KVExhausted, RequestError, describe

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _Call:
    """running: held until the function has come back; waiting for it takes half the time that an Event does."""

    function: Callable[[], Any]
    running: threading.Lock = field(default_factory=threading.Lock)
    result: Any = None
    error: BaseException | None = None


class Guard:
    """Runs calls on one worker thread. A call that outlives `timeout_s` is abandoned and the thread replaced.

    Python cannot stop a thread, so an abandoned call may still write to what it was given: `settled` says when it no
    longer can, and the engine keeps the KV blocks of its requests out of use until then.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._abandoned: list[_Call] = []
        self._start()
        self.active = ""  # the innermost component at work; written by wrappers on the worker thread

    def _start(self) -> None:
        self._calls = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name="pluglm-worker", daemon=True).start()

    def call(self, component: str, function: Callable[[], ResultT]) -> ResultT:
        """function() on the worker. Errors come back as ComponentFailure naming `component` or the one inside it."""
        call = _Call(function)
        call.running.acquire()
        self.active = component
        self._calls.put(call)
        if not call.running.acquire(timeout=self._timeout_s):
            self._abandoned.append(call)
            self._calls.put(None)
            self._start()
            raise ComponentFailure(self.active, f"gave no answer within {self._timeout_s:g} s and was abandoned")
        if isinstance(call.error, ComponentFailure | RequestError | KeyboardInterrupt):
            raise call.error
        if call.error is not None:
            raise ComponentFailure(self.active, f"raised {describe(call.error)}") from call.error
        return call.result  # type: ignore[no-any-return]

    @property
    def settled(self) -> bool:
        """No abandoned call is still running."""
        self._abandoned = [call for call in self._abandoned if call.running.locked()]
        return not self._abandoned

    def wait_settled(self, share: float) -> None:
        """Give abandoned calls that share of the time-out to come back."""
        for call in self._abandoned:
            if call.running.acquire(timeout=share * self._timeout_s):
                call.running.release()

    def close(self) -> None:
        self._calls.put(None)


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call.result = call.function()
        except BaseException as error:  # handed to the caller, whatever it is
            call.error = error
        call.running.release()


class Watched:
    """Any component, with every method call marked as the active one while it runs (and left marked when it fails)."""

    def __init__(self, target: Any, guard: Guard, name: str) -> None:
        self._target, self._guard, self._name = target, guard, name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._target, attribute)
        if not callable(value):
            return value
        guard, name = self._guard, self._name

        def call(*args: Any, **kwargs: Any) -> Any:
            outer, guard.active = guard.active, name
            try:
                result = value(*args, **kwargs)
            except KVExhausted:  # an answer, not a failure
                guard.active = outer
                raise
            guard.active = outer
            return result

        setattr(self, attribute, call)
        return call
