"""Consoles for stdout and stderr, and progress bars that only a terminal sees. Knows no command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

UNWRAPPED = 4096  # columns when nobody looks: tables in files and pipes are never folded


def console_on(stream: TextIO) -> Console:
    """A console that takes text literally and folds lines on a terminal only."""
    width = None if stream.isatty() else UNWRAPPED
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def print_on(stream: TextIO, *parts: RenderableType) -> None:
    """The parts with an empty line between them. Raises BrokenPipeError, where rich's own print ends the process."""
    console = console_on(stream)
    with console.capture() as captured:
        for index, part in enumerate(parts):
            console.print(*([""] if index else []), part, sep="\n")
    lines = captured.get().splitlines()
    stream.write("".join(f"{line.rstrip()}\n" for line in lines))
    stream.flush()


def is_too_wide(table: Table, stream: TextIO) -> bool:
    """Whether cells of the table would have to be folded on this stream."""
    console = console_on(stream)
    unwrapped = console.options.update(width=UNWRAPPED)
    return console.measure(table, options=unwrapped).maximum > console.width


def new_table(title: str | None, *columns: str) -> Table:
    """A plain table, titled at the left; long cells fold, so that nothing is cut."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


class Bars:
    """A callback (what, done, total) that draws one bar per `what`, or nothing without a Progress."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._tasks = progress, dict[str, TaskID]()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._progress is None:
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """The bars are away, so that the stream can be written to."""
        if self._progress is not None:
            self._progress.stop()
        yield
        if self._progress is not None:
            self._progress.start()


@contextmanager
def progress_bars(stream: TextIO, quiet: bool) -> Iterator[Bars]:
    """Bars that only a terminal sees, and that are gone afterwards."""
    if quiet or not stream.isatty():
        yield Bars(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console_on(stream), transient=True) as progress:
        yield Bars(progress)
