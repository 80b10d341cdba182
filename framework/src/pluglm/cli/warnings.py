"""Shows the engine's warnings (a dropped hook, a failing component) on stderr while a command runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def warnings_on(stream: TextIO, debug: bool = False) -> Iterator[None]:
    """One line `warning: ...` for each record of logger `pluglm`, with debug also where a plugin raised.

    The logger is as before afterwards.
    """
    logger, level = logging.getLogger("pluglm"), logging.DEBUG if debug else logging.WARNING
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.setLevel(level)
    before = logger.level
    logger.addHandler(handler)
    if debug:
        logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
