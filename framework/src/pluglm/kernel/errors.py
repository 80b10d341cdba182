"""Every error that pluglm raises on purpose: one line that names the thing and the fix. And how to word one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PluglmError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line ends with."""

    exit_code = 2


class ConfigError(PluglmError):
    """The run's config is wrong: file, key path, value and the allowed values are in the message."""


class PluginError(PluglmError):
    """A named component could not be found, imported, checked or built; names distribution, version and entry point."""


class IncompatibleError(PluginError):
    """Two components that each work cannot work together; the message names the pair and the reason."""


class CheckpointError(PluglmError):
    """A weight file, its config or its tensors are missing, damaged or of an unsupported kind."""


class TokenizerError(PluglmError):
    """A tokenizer or a chat template is missing, damaged or of an unsupported kind."""


class RequestError(PluglmError):
    """One request cannot be accepted (empty prompt, too long, bad parameter); other requests are unaffected."""


class KVExhausted(PluglmError):  # noqa: N818 - a condition the scheduler handles, not a failure
    """The KV manager has no room for the extension asked for; nothing was changed."""


class ComponentFailure(PluglmError):  # noqa: N818 - named for what it reports
    """A component raised, hung or returned something its contract forbids while the engine ran.

    `component` is "slot 'name'"; the requests it touched end with reason `error` and this message.
    """

    exit_code = 1

    def __init__(self, component: str, what: str) -> None:
        super().__init__(f"{component} {what}")
        self.component = component


def describe(error: BaseException) -> str:
    """One line about an exception: its type unless it is ours, and its message."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a plugin's error may not even word itself
        text = "no message can be had of it"
    return text if isinstance(error, PluglmError) else f"{type(error).__name__}: {text}"


def nearest(name: str, known: Iterable[str]) -> str:
    """ ", did you mean 'x'?" for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean '{close[0]}'?" if close else ""
