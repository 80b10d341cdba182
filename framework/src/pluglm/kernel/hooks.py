"""Every hook of a run. A hook plugin is a class in group `pluglm.hooks` with any of these methods, marked @hookimpl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pluggy

from pluglm.kernel.interfaces.component import ComponentConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pluglm.kernel.core import Event, Request, StepPlan, StepView

HOOK_VERSION = 1

hookspec = pluggy.HookspecMarker("pluglm")
hookimpl = pluggy.HookimplMarker("pluglm")


class Hook(Protocol):
    """A hook class is built as cls(config). It watches; nothing it returns or raises changes the run."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    interface_version: ClassVar[int]


class HookSpecs:
    """Called in the order of a run, inside a step: of the engine, only `cancel` may be called from here."""

    @hookspec
    def run_started(self, plan: Mapping[str, Any]) -> None:
        """The engine is ready. plan: JSON data, slot -> distribution, version, class and config of what fills it."""

    @hookspec
    def request_admitted(self, request: Request) -> None:
        """A request passed admission."""

    @hookspec
    def step_planned(self, view: StepView, plan: StepPlan) -> None:
        """The validated plan of a step, before it runs."""

    @hookspec
    def event_emitted(self, event: Event) -> None:
        """New tokens or the end of one request."""

    @hookspec
    def step_done(self, step: int, seconds: float, num_tokens: int) -> None:
        """A step is over; seconds on the backend's clock, num_tokens computed."""

    @hookspec
    def run_finished(self) -> None:
        """The engine is closing."""
