"""The thread count of torch for the length of a block. Knows that the count belongs to the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def thread_count(num_threads: int | None) -> AbstractContextManager[None]:
    """torch runs with num_threads inside, and with what it had before afterwards. None changes nothing.

    torch keeps one count per process. Restoring it lets engines with different counts take turns in one process;
    engines that step at the same moment in several threads should ask for the same count.
    """
    before = torch.get_num_threads()
    return nullcontext() if num_threads is None or num_threads == before else _changed(num_threads, before)


@contextmanager
def _changed(num_threads: int, before: int) -> Iterator[None]:
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
