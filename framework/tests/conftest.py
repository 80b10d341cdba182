"""Fixtures of the framework's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from pluglm.native.build import NativeBuildError, find_compiler
from pluglm.native.tools import NativeTools


@pytest.fixture(scope="session")
def native_tools() -> Callable[..., NativeTools]:
    """(level, num_threads=2) -> tools, made once a session each. The test is skipped where there is no compiler."""
    try:
        find_compiler()
    except NativeBuildError as error:
        pytest.skip(str(error))
    return cache(lambda level, num_threads=2: NativeTools(num_threads, level))
