"""Whether a run plans ahead: what the config wishes, what the components can do, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.backend import LaunchingBackend
from pluglm.kernel.interfaces.kernels import KernelChoice, KernelReport
from pluglm.kernel.interfaces.scheduler import PlansAhead

Wish = bool | Literal["auto"]


def plans_ahead(wish: Wish, backend: Any, scheduler: Any, names: Mapping[str, str]) -> bool:
    """`auto` is yes where it can be, and the backend's log says why not. names: of everything in the run, by slot.

    Raises IncompatibleError with the reason when it is asked for and cannot be.
    """
    if wish is False:
        return False
    reason = why_not(type(backend), type(scheduler), names)
    require_possible(wish, reason)
    if isinstance(backend, KernelReport):
        refused = () if reason is None else (("ahead", reason),)
        backend.kernels.add(KernelChoice("planning", "ahead" if reason is None else "step by step", refused))
    return reason is None


def require_possible(wish: Wish, reason: str | None) -> None:
    """Raises IncompatibleError when it is asked for and `why_not` gave a reason."""
    if wish is True and reason is not None:
        raise IncompatibleError(f"engine.plan_ahead: {reason}; set it to auto or false")


def promises(cls: type[Any]) -> bool:
    """Whether a scheduler or policy class has the ability PlansAhead, of its own: who changes a class may break it."""
    return issubclass(cls, PlansAhead) and "checkpoint" in vars(cls)


def why_not(backend: type[Any], scheduler: type[Any], names: Mapping[str, str]) -> str | None:
    """Why components of these classes cannot have their steps planned ahead, or None."""
    if not issubclass(backend, LaunchingBackend):
        return f"{names['backend']} computes on the thread that plans, and gains nothing by it"
    if not promises(scheduler):
        return f"{names['scheduler']} cannot take back what it was asked about a step that does not come"
    if "drafter" in names:
        return f"{names['drafter']} has its say before each plan"
    if tiers := [name for slot, name in names.items() if slot.startswith("kv_tiers.")]:
        return f"{tiers[0]} may bring KV before each plan"
    return None
