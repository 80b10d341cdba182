"""Which kernel computes an operation, and why: the record of a choice, and what a backend hands to its mates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pluglm.kernel.errors import IncompatibleError


class Candidate(NamedTuple):
    """One way to compute an operation. can_run: None, or why not, for a configuration that both sides understand."""

    name: str
    can_run: Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What runs an operation. refused: (kernel, reason) of those that would have been preferred."""

    operation: str
    kernel: str
    refused: tuple[tuple[str, str], ...] = ()


def choose(operation: str, candidates: Sequence[Candidate], configuration: Any) -> KernelChoice:
    """The first candidate, in order of preference, that can run it; the last should run everything.

    IncompatibleError with every reason when none can.
    """
    refused: list[tuple[str, str]] = []
    for candidate in candidates:
        reason = candidate.can_run(configuration)
        if reason is None:
            return KernelChoice(operation, candidate.name, tuple(refused))
        refused.append((candidate.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise IncompatibleError(f"no kernel can run {operation}: {reasons}")


class KernelLog:
    """The choices of one run, in the order they were made; equal ones count once."""

    def __init__(self) -> None:
        self.choices: list[KernelChoice] = []

    def add(self, choice: KernelChoice) -> KernelChoice:
        if choice not in self.choices:
            self.choices.append(choice)
        return choice


@runtime_checkable
class KernelReport(Protocol):
    """Optional ability of a backend: it says which kernels run. The log fills up while a run is built and warms up."""

    kernels: KernelLog


@runtime_checkable
class ToolOwner(Protocol):
    """Optional ability of a backend: tools of its device that its mates may use too, such as one pool of threads.

    `tools` is opaque to the kernel and goes into BuildContext.tools; who uses it checks its type.
    """

    tools: Any
