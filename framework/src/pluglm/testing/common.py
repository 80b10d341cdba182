"""Checks that hold for every component: version, config model, building, capabilities. Knows no single interface."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from pluglm.assembly.registry import KINDS
from pluglm.kernel.interfaces.component import Capabilities
from pluglm.testing.check import Check, expect, expect_raises, make_check


def kernel_version(kind: str) -> int:
    """The interface version that this kernel speaks for a kind of component."""
    path, name = KINDS[kind]
    return int(getattr(importlib.import_module(path.partition(":")[0]), name))


def provides(cls: type[Any], config: BaseModel, tag: str) -> bool:
    """Whether the component declares a capability tag; the checks of that tag are made only then."""
    return tag in _declared(cls, config).provides


def _declared(cls: type[Any], config: BaseModel) -> Capabilities:
    """What the class declares; one without the method declares nothing."""
    declare: Callable[[BaseModel], Capabilities] | None = getattr(cls, "capabilities", None)
    return Capabilities() if declare is None else declare(config)


def leave_open(component: object) -> None:
    """For components that open nothing."""


def common_checks(kind: str, cls: type[Any], config: Any, build: Callable[[], Any]) -> Iterator[Check]:
    """Checks of any component class. build: a fresh object, as the kernel would build it."""
    yield from class_checks(kind, cls, config, build)
    yield make_check(capabilities_are_pure, cls, config)
    yield make_check(capability_tags_have_a_kind, cls, config)


def class_checks(
    kind: str, cls: type[Any], config: Any, build: Callable[[], Any], close: Callable[[Any], None] = leave_open
) -> Iterator[Check]:
    """The part of the common checks that also holds for hooks, which declare no capabilities.

    close: ends what a fresh object may have opened.
    """
    yield make_check(states_its_interface_version, kind, cls)
    yield make_check(config_is_frozen, cls)
    yield make_check(config_forbids_unknown_keys, cls, config)
    yield make_check(builds_independent_objects, build, close)


def states_its_interface_version(kind: str, cls: type[Any]) -> None:
    version = kernel_version(kind)
    found = getattr(cls, "interface_version", None)
    expect(found == version, f"interface_version = {version}", found)


def config_is_frozen(cls: type[Any]) -> None:
    expect(issubclass(cls.Config, BaseModel), "a pydantic model as Config", cls.Config)
    expect(cls.Config.model_config.get("frozen") is True, "Config with frozen=True", cls.Config.model_config)


def config_forbids_unknown_keys(cls: type[Any], config: BaseModel) -> None:
    with expect_raises(ValidationError, "for a config with an unknown key"):
        cls.Config.model_validate({**config.model_dump(), "no_such_key_of_any_component": 1})


def builds_independent_objects(build: Callable[[], Any], close: Callable[[Any], None]) -> None:
    """Two engines may live in one process, so two objects share no container that either could change."""
    first, second = build(), build()
    expect(first is not second, "a new object from each build", "the same object twice")
    shared = [name for name, value in _state(first).items() if value is _state(second).get(name, first)]
    close(first)
    close(second)
    expect(not shared, "no mutable attribute shared by two objects", ", ".join(shared))


def _state(component: Any) -> dict[str, Any]:
    names = [*getattr(component, "__dict__", {}), *getattr(type(component), "__slots__", ())]
    values = {name: getattr(component, name, None) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, dict | list | set | bytearray)}


def capabilities_are_pure(cls: type[Any], config: Any) -> None:
    first, second = _declared(cls, config), _declared(cls, config)
    expect(isinstance(first, Capabilities), "a Capabilities object", type(first).__name__)
    expect(first == second, "equal capabilities for equal configs", f"{first} and {second}")


def capability_tags_have_a_kind(cls: type[Any], config: Any) -> None:
    capabilities = _declared(cls, config)
    tags = [*capabilities.provides, *capabilities.needs, *capabilities.refuses]
    bad = [tag for tag in tags if not all(tag.partition(":")[::2])]
    expect(not bad, "tags of the form kind:value", bad)
    mute = [tag for tag, why in [*capabilities.needs.items(), *capabilities.refuses.items()] if not why.strip()]
    expect(not mute, "a reason in words for every needed or refused tag", mute)


COMMON = frozenset(
    {
        "states_its_interface_version",
        "config_is_frozen",
        "config_forbids_unknown_keys",
        "builds_independent_objects",
        "capabilities_are_pure",
        "capability_tags_have_a_kind",
    }
)
