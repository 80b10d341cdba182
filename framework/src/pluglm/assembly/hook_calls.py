"""Runs hooks through pluggy's specs, one at a time: one that raises or hangs is dropped, and the run goes on."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pluggy

from pluglm.kernel.errors import PluginError, PluglmError
from pluglm.kernel.guard import Guard
from pluglm.kernel.hooks import HookSpecs

logger = logging.getLogger("pluglm")
HOOKS = [name for name in vars(HookSpecs) if not name.startswith("_")]


class HookCaller:
    """`call` reaches every registered hook that has the method. failures: hook name -> why it was dropped."""

    def __init__(self, hooks: dict[str, Any], guard: Guard) -> None:
        """Raises PluginError for a method that is no hook, and for wrappers: a hook watches, it does not surround."""
        self.failures: dict[str, str] = {}
        self._guard = guard
        self._manager = pluggy.PluginManager("pluglm")
        self._manager.add_hookspecs(HookSpecs)
        for name, hook in hooks.items():
            self._manager.register(hook, name=name)
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(
                f"hooks: {' '.join(str(error).split())}; known hooks are in pluglm.kernel.hooks"
            ) from error

        for name in HOOKS:
            for one in getattr(self._manager.hook, name).get_hookimpls():
                if one.wrapper or one.hookwrapper:
                    raise PluginError(f"hooks '{one.plugin_name}': {name} is a wrapper; write a plain @hookimpl")
        self._listeners = self._list_listeners()

    def _list_listeners(self) -> dict[str, list[pluggy.HookImpl]]:
        """By hook; asked for with every token, so a list of them is kept."""
        return {name: getattr(self._manager.hook, name).get_hookimpls() for name in HOOKS}

    def call(self, hook: str, **arguments: Any) -> None:
        for one in self._listeners[hook]:
            given = [arguments[name] for name in one.argnames]
            try:
                self._guard.call(f"hook '{one.plugin_name}'", partial(one.function, *given))
            except PluglmError as error:
                self.failures[one.plugin_name] = f"{hook}: {error}"
                self._manager.unregister(name=one.plugin_name)
                self._listeners = self._list_listeners()
                logger.warning("hook '%s' is dropped: %s: %s", one.plugin_name, hook, error)
