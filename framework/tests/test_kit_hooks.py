"""The kit of hooks is tested: a plain counter passes, and for every check one broken hook class fails only that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pluglm.kernel.core import Event
from pluglm.kernel.hooks import hookimpl
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.hooks import hooks_checks

CLASS_CHECKS = COMMON - {"capabilities_are_pure", "capability_tags_have_a_kind"}


class CountsEvents:
    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig) -> None:
        self.counts: dict[str, int] = {}

    @hookimpl
    def event_emitted(self, event: Event) -> None:
        self.counts[event.request_id] = self.counts.get(event.request_id, 0) + 1

    def report(self) -> str:
        return str(self.counts)


class NoHook:
    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig) -> None:
        self.counts: dict[str, int] = {}

    def report(self) -> str:
        return str(self.counts)


class Misspelt(CountsEvents):
    @hookimpl
    def event_emited(self, event: Event) -> None:
        """Never called: the spec has another t."""


class Unmarked(CountsEvents):
    def step_done(self, step: int, seconds: float, num_tokens: int) -> None:
        """Never called: the marker is missing."""


class WantsMore(CountsEvents):
    @hookimpl
    def step_done(self, step: int, duration: float = 0.0) -> None:
        """Pluggy refuses an argument that the spec does not have."""


class NeedsTokens(CountsEvents):
    @hookimpl
    def event_emitted(self, event: Event) -> None:
        self.counts[event.request_id] = event.token_ids[0]


class EmptiesThePlan(CountsEvents):
    @hookimpl
    def run_started(self, plan: Mapping[str, Any]) -> None:
        plan.clear()  # type: ignore[attr-defined]


BROKEN: dict[str, type[Any]] = {
    "implements_a_hook": NoHook,
    "marked_methods_are_hooks": Misspelt,
    "hooks_are_marked": Unmarked,
    "arguments_fit_the_specs": WantsMore,
    "hooks_can_be_called": NeedsTokens,
    "what_is_shown_is_not_changed": EmptiesThePlan,
}


def test_a_plain_hook_passes() -> None:
    report = run_checks(hooks_checks(CountsEvents))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in hooks_checks(CountsEvents)} == CLASS_CHECKS | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_hook_fails_exactly_its_check(name: str) -> None:
    report = run_checks(hooks_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
