"""Finds the kit of a kind of component by its name. Imports a kit only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

from pluglm.assembly.registry import KINDS
from pluglm.testing.check import Check


def kit(kind: str) -> Callable[..., Iterator[Check]]:
    """The generator of checks for `kind`, a key of the kernel's KINDS. ValueError for another one."""
    if kind not in KINDS:
        raise ValueError(f"no interface is called '{kind}'; kits: {', '.join(KINDS)}")
    found: Callable[..., Iterator[Check]] = getattr(importlib.import_module(f"pluglm.testing.{kind}"), f"{kind}_checks")
    return found
