"""Whether the model and the files that a config names are there and of the right kind, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
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


@runtime_checkable
class ModelNamer(Protocol):
    """Optional ability of a component that runs models of its own: says which its config names."""

    @classmethod
    def named_models(cls, config: Any) -> Sequence[str]:
        """As `model.path` names one: a path, a registered name or a hub id. Called as `check_files` is."""
        ...


def check_files(run: ResolvedRun) -> None:
    """Raises PluginError for the first component whose files cannot serve, or one of whose models is nowhere."""
    for slot, part in run.parts.items():
        asked = ""
        try:
            if isinstance(part.cls, FileChecker):
                asked = "check_files"
                part.cls.check_files(part.config)
            if isinstance(part.cls, ModelNamer):
                asked = "named_models"
                for name in part.cls.named_models(part.config):
                    _require_model(f"{slot} '{part.entry.name}'", name)
        except PluglmError as error:
            raise PluginError(f"{run.config.source}: {error}") from error
        except Exception as error:  # the plugin's own code
            raise PluginError(f"{part.entry}: {asked}() raised {describe(error)}") from error


def _require_model(component: str, name: str) -> None:
    try:
        require_known_model(name)
    except CheckpointError as error:
        raise CheckpointError(f"{component}: {error}") from error


def check_model_name(run: ResolvedRun) -> None:
    """Raises CheckpointError when model.path is nothing that could be a model."""
    model = run.config.model
    try:
        require_known_model(model.path, model.revision)
    except CheckpointError as error:
        raise CheckpointError(f"{run.config.source}: model.path: {error}") from error
