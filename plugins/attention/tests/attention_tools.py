"""The tools of the native kernels for tests, where they can be built."""

from __future__ import annotations

from functools import cache

import pytest

from pluglm.native.build import NativeBuildError
from pluglm.native.tools import NativeTools


@cache
def _tools(num_threads: int) -> NativeTools | str:
    try:
        return NativeTools(num_threads)
    except NativeBuildError as error:
        return str(error)


def native_tools(num_threads: int = 1) -> NativeTools:
    """Skips the test, with the reason, on a machine without a compiler."""
    tools = _tools(num_threads)
    if isinstance(tools, str):
        pytest.skip(f"no native kernels: {tools}")
    return tools
