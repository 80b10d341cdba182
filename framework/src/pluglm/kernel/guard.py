"""Calls into plugins: names the one that raised, gives up on one that hangs, and lets the engine live on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from pluglm.kernel.errors import ComponentFailure, KVExhausted, RequestError, describe

ResultT = TypeVar("ResultT")
Guarded: TypeAlias = Generator[tuple[str, Callable[[], Any]], Any, ResultT]  # yields (component, what to call of it)

_CHECK_S = 0.01  # between two looks at a call that has only just begun


class _Errand:
    """A generator on its way through one worker thread: from its start, or from the failure of an abandoned call.

    Of each call, whoever takes `claim` first decides: the worker, that it is back; or the caller, that it is abandoned.
    The generator stands still meanwhile, so it is then free to go on elsewhere.
    """

    def __init__(self, steps: Guarded[Any], guard: Guard, failure: BaseException | None) -> None:
        self.steps, self._guard, self._failure = steps, guard, failure
        self.done, self.claim, self.call = Lock(), Lock(), Lock()  # call: held while one runs
        self.done.acquire()
        self.claim.acquire()
        self.call_began_s, self.is_stopped, self.is_over = monotonic(), False, False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> bool:
        """On the worker: to the end of the generator. False when a call was abandoned, and the thread with it."""
        steps, guard = self.steps, self._guard
        try:
            wanted = steps.send(None) if self._failure is None else steps.throw(self._failure)
            while not self.is_stopped:
                guard.active, function = wanted
                self.call_began_s, self.claim = monotonic(), Lock()
                claim = self.claim
                with self.call:
                    result, error = _outcome(function)
                if not claim.acquire(blocking=False):
                    return False
                wanted = steps.send(result) if error is None else steps.throw(guard.explain(error))
        except StopIteration as end:
            self.result = end.value
        except BaseException as raised:  # handed to the caller, whatever it is
            self.error = raised
        self.is_over = True
        return True


class Guard:
    """Runs the engine's code and the calls into plugins on a worker thread, while the caller waits.

    The engine's code is a generator that yields each call and is sent what came of it, so a step of several calls costs
    one change of threads there and one back. A call that outlives `timeout_s` is abandoned with its thread, and
    the generator goes on upon another one.

    Python cannot stop a thread, so an abandoned call may still write to what it was given: `settled` says when it no
    longer can, and the engine keeps the KV blocks of its requests out of use until then.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._errands: SimpleQueue[_Errand | None] = SimpleQueue()
        self._num_idle = 0  # threads that wait for an errand
        self._abandoned: list[_Errand] = []
        self.active = ""  # the innermost component at work; written by wrappers on the worker thread

    def call(self, component: str, function: Callable[[], ResultT]) -> ResultT:
        """function() on a worker. Errors come back as ComponentFailure naming `component` or the one inside it.

        Also from code that is on a worker itself, as that of `run` is: it waits for another one.
        """
        return self.run(_alone(component, function))

    def run(self, steps: Guarded[ResultT]) -> ResultT:
        """What the generator returns. A call of it that fails raises there, as `call` does."""
        failure: BaseException | None = None
        while True:
            errand = _Errand(steps, self, failure)
            if self._num_idle:
                self._num_idle -= 1
            else:
                Thread(target=_work, args=(self._errands,), name="pluglm-worker", daemon=True).start()
            try:
                self._errands.put(errand)
                is_done = self._is_done(errand)
            except BaseException as error:
                self._interrupt(errand, error)
                raise
            if is_done:
                self._num_idle += 1
                if errand.error is not None:
                    raise errand.error
                return errand.result  # type: ignore[no-any-return]
            self._abandoned.append(errand)
            failure = ComponentFailure(self.active, f"gave no answer within {self._timeout_s:g} s and was abandoned")

    def _is_done(self, errand: _Errand) -> bool:
        """Waits; False when a call of it took too long and is abandoned."""
        left_s = self._timeout_s
        while not errand.done.acquire(timeout=left_s):
            claim = errand.claim  # before the time, lest a call that begins just now pays for the one before it
            late_s = monotonic() - errand.call_began_s - self._timeout_s
            if late_s >= 0 and claim.acquire(blocking=False):
                return False
            left_s = max(-late_s, _CHECK_S)
        return True

    def _interrupt(self, errand: _Errand, error: BaseException) -> None:
        """The caller is interrupted, and so is the engine where it stands. A second interrupt waits for that too.

        It comes to a stop with the call that runs, and at the latest when that call's own calls have come back.
        """
        errand.is_stopped = True
        while not errand.is_over:
            with suppress(KeyboardInterrupt):
                if errand.claim.acquire(timeout=_CHECK_S):
                    self._abandoned.append(errand)
                    break
        else:
            self._num_idle += 1
        errand.steps.throw(error)

    def explain(self, error: BaseException) -> BaseException:
        """What the engine is told of an error in a call."""
        if isinstance(error, ComponentFailure | RequestError | KeyboardInterrupt):
            return error
        failure = ComponentFailure(self.active, f"raised {describe(error)}")
        failure.__cause__ = error
        return failure

    @property
    def settled(self) -> bool:
        """No abandoned call is still running."""
        self._abandoned = [one for one in self._abandoned if one.call.locked()]
        return not self._abandoned

    def wait_settled(self, share: float) -> None:
        """Give abandoned calls that share of the time-out to come back."""
        for one in self._abandoned:
            if one.call.acquire(timeout=share * self._timeout_s):
                one.call.release()

    def close(self) -> None:
        for _ in range(self._num_idle):
            self._errands.put(None)


def _alone(component: str, function: Callable[[], ResultT]) -> Guarded[ResultT]:
    return (yield component, function)  # type: ignore[no-any-return]


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What it returned, or the error that it raised, whatever that is."""
    try:
        return function(), None
    except BaseException as error:
        return None, error


def _work(errands: SimpleQueue[_Errand | None]) -> None:
    while (errand := errands.get()) is not None and errand.run():
        done = errand.done
        del errand  # an idle thread keeps nothing alive
        done.release()


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
