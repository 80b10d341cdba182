"""The engine for event loops: its blocking calls on threads, and what happens to them when a task is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from typing import TypeVar

ResultT = TypeVar("ResultT")
ChunkT = TypeVar("ChunkT")


async def on_thread(call: Callable[[threading.Event], ResultT]) -> ResultT:
    """What call returns; the event that it is given is set when nobody waits for it any more."""
    unwanted = threading.Event()
    try:
        return await asyncio.to_thread(call, unwanted)
    finally:
        unwanted.set()


async def each(start: Callable[[], Generator[ChunkT, None, None]]) -> AsyncIterator[ChunkT]:
    """The items of the generator that start returns; closing the iterator closes it."""
    chunks = await asyncio.to_thread(start)
    try:
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk
    finally:
        await asyncio.to_thread(_close, chunks)


def _close(chunks: Generator[ChunkT, None, None]) -> None:
    with suppress(ValueError):  # it is at work on another thread, and ends with its last reference there
        chunks.close()
