"""The checks that every component gets are tested: one broken class for each fails exactly that, in a whole kit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from pluglm.assembly.registry import KINDS
from pluglm.kernel.core import Event, RequestView, StepView
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, Stop
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON, kernel_version
from pluglm.testing.scheduling_policy import scheduling_policy_checks


class PlainPolicy:
    """A policy of the fewest possible decisions."""

    interface_version = 1
    Config: type[BaseModel] = ComponentConfig

    def __init__(self, config: Any, context: Any) -> None:
        self.num_events = 0

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def admit(self, request: RequestView, num_waiting: int) -> Accept:
        return Accept()

    def order_running(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in view.running]

    def order_waiting(self, view: StepView) -> Iterable[int]:
        return [request.sequence_id for request in view.waiting]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return tokens_left

    def on_blocked(self, view: StepView, request: RequestView, need: str) -> Stop:
        return Stop()

    def on_event(self, event: Event) -> None:
        self.num_events += 1


class NewerVersion(PlainPolicy):
    interface_version = 2


class ThawedConfig(PlainPolicy):
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid")


class LaxConfig(PlainPolicy):
    class Config(BaseModel):
        model_config = ConfigDict(frozen=True, extra="ignore")


class SharedList(PlainPolicy):
    """The mutable default argument, for once on the class."""

    shared: list[str] = []  # noqa: RUF012 - the shared state is what is wrong with it

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.seen = self.shared


class OtherAnswers(PlainPolicy):
    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        cls.interface_version_asked = getattr(cls, "interface_version_asked", 0) + 1
        return Capabilities(provides=frozenset({f"asked:{cls.interface_version_asked}"}))


class BareTag(PlainPolicy):
    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(needs={"drafter": "it counts drafts"})


BROKEN: dict[str, type[Any]] = {
    "states_its_interface_version": NewerVersion,
    "config_is_frozen": ThawedConfig,
    "config_forbids_unknown_keys": LaxConfig,
    "builds_independent_objects": SharedList,
    "capabilities_are_pure": OtherAnswers,
    "capability_tags_have_a_kind": BareTag,
}


def test_a_plain_component_passes() -> None:
    report = run_checks(scheduling_policy_checks(PlainPolicy))
    assert report.ok, str(report)


def test_every_common_check_has_a_broken_fixture() -> None:
    assert set(BROKEN) == COMMON


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_component_fails_exactly_its_check(name: str) -> None:
    report = run_checks(scheduling_policy_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)


def test_a_tag_without_a_reason_is_found() -> None:
    class Mute(PlainPolicy):
        @classmethod
        def capabilities(cls, config: Any) -> Capabilities:
            return Capabilities(refuses={"slot:drafter": " "})

    assert run_checks(scheduling_policy_checks(Mute)).failed == ("capability_tags_have_a_kind",)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_states_a_version_of_every_interface(kind: str) -> None:
    assert kernel_version(kind) >= 1
