"""Turns whatever a command raises into one line on stderr and an exit code. Knows no command."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import ParamSpec

import typer

from pluglm.kernel.errors import PluglmError

DONE, FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
HELP = (
    "Exit codes: 0 done; 1 a component failed or pluglm has a bug; 2 the config, the input or the command line is "
    "wrong; 130 interrupted; 141 the reader of the output went away."
)

WORKER_THREAD = "pluglm-worker"  # as in `pluglm.engine`, which takes seconds to import
PATIENCE_S = 3.0

CallP = ParamSpec("CallP")


def say_error(text: str) -> None:
    """One line on stderr, if that takes it: the exit code says what happened either way."""
    with contextlib.suppress(OSError):
        typer.echo(f"error: {' '.join(text.split())}", err=True)


def guarded(command: Callable[CallP, int]) -> Callable[CallP, None]:
    """The command, ending the process with the exit code that it returns or that its error stands for.

    The command takes the typer context as `ctx`; `ctx.obj` is true when tracebacks are wanted (--debug).
    """

    @functools.wraps(command)
    def run(*args: CallP.args, **kwargs: CallP.kwargs) -> None:
        debug = bool(getattr(kwargs.get("ctx"), "obj", False))
        raise typer.Exit(exit_code(lambda: command(*args, **kwargs), debug))

    return run


def exit_code(action: Callable[[], int], debug: bool) -> int:
    """What `action` returns, or the code of what it raises; only --debug shows a traceback."""
    try:
        code = action()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _forget_stdout()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return interrupted()
    except PluglmError as error:
        _show_traceback(debug)
        say_error(str(error))
        return error.exit_code
    except OSError as error:  # such as a full disk behind stdout
        _show_traceback(debug)
        say_error(str(error))
        _forget_stdout()
        return FAILED
    except Exception as error:  # a bug of ours must still end in one line
        _show_traceback(debug)
        hint = "" if debug else "; `pluglm --debug ...` shows where"
        say_error(f"internal error, please report it: {type(error).__name__}: {error}{hint}")
        return FAILED


def interrupted() -> int:
    """Says so, and waits for the threads of closed engines: one that is cut off within torch aborts the process.

    A call that hangs is waited for no longer than PATIENCE_S.
    """
    say_error("interrupted")
    deadline_s = time.monotonic() + PATIENCE_S
    for thread in threading.enumerate():
        if thread.name == WORKER_THREAD:
            thread.join(max(0.0, deadline_s - time.monotonic()))
    return INTERRUPTED


def _show_traceback(debug: bool) -> None:
    if debug:
        typer.echo(traceback.format_exc(), err=True, nl=False)


def _forget_stdout() -> None:
    """Nobody takes what is still buffered: let it go nowhere, or the interpreter would complain at its exit."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:  # a stdout without a descriptor has no pipe
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
