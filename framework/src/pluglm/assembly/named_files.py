"""Whether the model and the files that a config names are there and of the right kind, before anything is built."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from pluglm.assembly.resolving import ResolvedRun
from pluglm.kernel.errors import CheckpointError, PluginError, PluglmError, describe
from pluglm.weights.resolve import require_known_model


@runtime_checkable
class FileChecker(Protocol):
    """Optional ability of a component: looks at the files that its config names before anything is built."""

    @classmethod
    def check_files(cls, config: Any) -> None:
        """Raises a PluglmError of one line, with the component's name, for a file that cannot serve.

        It reads no weights and asks no network. Called once a run, and by `pluglm config check`.
        """
        ...


def check_files(run: ResolvedRun) -> None:
    """Raises PluginError for the first component whose files cannot serve."""
    for part in run.parts.values():
        if not isinstance(part.cls, FileChecker):
            continue
        try:
            part.cls.check_files(part.config)
        except PluglmError as error:
            raise PluginError(f"{run.config.source}: {error}") from error
        except Exception as error:  # the plugin's own code
            raise PluginError(f"{part.entry}: check_files() raised {describe(error)}") from error


def check_model_name(run: ResolvedRun) -> None:
    """Raises CheckpointError when model.path is nothing that could be a model."""
    model = run.config.model
    try:
        require_known_model(model.path, model.revision)
    except CheckpointError as error:
        raise CheckpointError(f"{run.config.source}: model.path: {error}") from error
