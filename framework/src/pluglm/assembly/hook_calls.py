"""Runs hooks through pluggy's specs, one implementation at a time: a hook that raises is dropped, the run goes on."""

from __future__ import annotations

import logging
from typing import Any

import pluggy

from pluglm.kernel.errors import PluginError
from pluglm.kernel.guard import describe
from pluglm.kernel.hooks import HookSpecs

logger = logging.getLogger("pluglm")


class HookCaller:
    """`call` reaches every registered hook that has the method. failures: hook name -> why it was dropped."""

    def __init__(self, hooks: dict[str, Any]) -> None:
        self.failures: dict[str, str] = {}
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

    def call(self, hook: str, **arguments: Any) -> None:
        for one in list(getattr(self._manager.hook, hook).get_hookimpls()):
            try:
                one.function(*[arguments[name] for name in one.argnames])
            except Exception as error:  # whatever it raised, it is only a spectator
                self.failures[one.plugin_name] = f"{hook} raised {describe(error)}"
                self._manager.unregister(name=one.plugin_name)
                logger.warning("hook '%s' is dropped: %s", one.plugin_name, self.failures[one.plugin_name])
