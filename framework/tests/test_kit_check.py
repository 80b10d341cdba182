"""Checks and reports: what escapes from a check, what a table says, and that a kit exists for every interface."""

from __future__ import annotations

import pytest

from pluglm.assembly.registry import KINDS
from pluglm.testing import Check, ContractViolation, cases, kit, run_checks
from pluglm.testing.check import expect, expect_raises, make_check


def holds() -> None:
    expect(True, "nothing", "nothing")


def fails() -> None:
    expect(False, "one", "two")


def crashes() -> None:
    raise KeyError("lost\nline")


def test_a_violation_names_check_expected_and_found() -> None:
    with pytest.raises(ContractViolation, match=r"^fails: expected one, found two$"):
        make_check(fails).run()


def test_an_exception_of_the_component_is_a_violation_of_one_line() -> None:
    with pytest.raises(ContractViolation, match=r"^crashes: expected no exception, found KeyError: 'lost\\nline'$"):
        make_check(crashes).run()


def test_interrupts_are_not_swallowed() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_checks([make_check(interrupted)])


def test_a_report_goes_on_after_a_failure_and_prints_a_table() -> None:
    report = run_checks(make_check(one) for one in (fails, holds, crashes))
    assert report.failed == ("fails", "crashes")
    assert not report.ok
    lines = str(report).splitlines()
    assert lines[0] == "FAIL  fails: expected one, found two"
    assert lines[1] == "ok    holds"
    assert lines[-1] == "1 of 3 checks passed"


def test_arguments_reach_the_function() -> None:
    seen: list[int] = []
    make_check(seen.append, 3).run()
    assert seen == [3]


def test_expect_raises_wants_that_very_error() -> None:
    with expect_raises(ValueError, "here"):
        raise ValueError("fine")
    with (
        pytest.raises(ContractViolation, match="expected ValueError here, found no exception"),
        expect_raises(ValueError, "here"),
    ):
        holds()
    with (
        pytest.raises(ContractViolation, match="expected ValueError here, found TypeError: no"),
        expect_raises(ValueError, "here"),
    ):
        raise TypeError("no")


@pytest.mark.parametrize("check", **cases([make_check(holds)]))
def test_cases_are_arguments_of_parametrize(check: Check) -> None:
    assert check.name == "holds"
    check.run()


@pytest.mark.parametrize("kind", KINDS)
def test_every_interface_has_a_kit(kind: str) -> None:
    assert kit(kind).__name__ == f"{kind}_checks"


def test_an_unknown_kind_has_no_kit() -> None:
    with pytest.raises(ValueError, match="no interface is called 'atention'; kits: model, backend, attention"):
        kit("atention")
