"""What a check is and how a list of them is run. Knows no interface and needs no test runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class ContractViolation(Exception):  # noqa: N818 - named for what it reports
    """A component broke its contract; the message names the check, what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property of one interface. `run` returns None or raises ContractViolation, whatever the component does."""

    name: str
    run: Callable[[], None]


def make_check(function: Callable[..., None], *arguments: Any) -> Check:
    """A check named for `function`. Anything that escapes from it becomes a ContractViolation with that name."""
    name = function.__name__

    def run() -> None:
        try:
            function(*arguments)
        except ContractViolation as violation:
            raise ContractViolation(f"{name}: {violation}") from violation.__cause__
        except Exception as error:  # whatever a component raises is the finding
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise ContractViolation(f"{name}: expected no exception, found {what}") from error

    return Check(name, run)


def expect(holds: bool, expected: str, found: object) -> None:
    """Raise ContractViolation unless `holds`."""
    if not holds:
        raise ContractViolation(f"expected {expected}, found {found}")


@contextmanager
def expect_raises(error: type[Exception], when: str) -> Iterator[None]:
    """The body must raise `error`; another exception or none is a ContractViolation."""
    try:
        yield
    except error:
        return
    except Exception as other:
        raise ContractViolation(f"expected {error.__name__} {when}, found {type(other).__name__}: {other}") from other
    raise ContractViolation(f"expected {error.__name__} {when}, found no exception")


@dataclass(frozen=True, slots=True)
class Outcome:
    """problem: None when the check passed."""

    name: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """The outcomes of a run, in order. As a string it is a table of one line a check."""

    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(outcome.name for outcome in self.outcomes if outcome.problem is not None)

    @property
    def ok(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        lines = [f"FAIL  {one.problem}" if one.problem else f"ok    {one.name}" for one in self.outcomes]
        return "\n".join([*lines, f"{len(lines) - len(self.failed)} of {len(lines)} checks passed"])


def run_checks(checks: Iterable[Check]) -> Report:
    """Runs every check, never stopping at the first failure."""
    return Report(tuple(Outcome(check.name, _problem(check)) for check in checks))


def _problem(check: Check) -> str | None:
    try:
        check.run()
    except ContractViolation as violation:
        return str(violation)
    return None


def cases(checks: Iterable[Check]) -> dict[str, Any]:
    """Arguments for pytest: `@pytest.mark.parametrize("check", **cases(sampler_checks(MySampler)))`."""
    listed = list(checks)
    return {"argvalues": listed, "ids": [check.name for check in listed]}
