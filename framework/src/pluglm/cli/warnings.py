"""Shows the engine's warnings (a dropped hook, a failing component) on stderr while a command runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def warnings_on(stream: TextIO) -> Iterator[None]:
    """One line `warning: ...` for each record of logger `pluglm`; the logger is as before afterwards."""
    logger = logging.getLogger("pluglm")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
