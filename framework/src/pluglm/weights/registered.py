"""Finds the models that installed packages register by name. Loads only the one asked for, and opens no weights."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from pluglm.kernel.errors import CheckpointError, describe
from pluglm.weights.messages import quoted

GROUP = "pluglm.weights"


def registered_names() -> list[str]:
    """The registered names, sorted; reads package metadata only."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def is_registered(name: str) -> bool:
    """Whether a package registers `name` (or `distribution:name`); reads package metadata only."""
    return bool(_points(name))


def registered_model(name: str) -> Path | None:
    """The weights registered as `name` (or `distribution:name`), or None when no package registers it.

    Raises CheckpointError when two packages do, when the entry point cannot be loaded, when its callable fails or
    returns no existing path; the message names distribution, version and entry point.
    """
    points = _points(name)
    if not points:
        return None
    if len(points) > 1:
        owners, plain = " and ".join(_owner(point) for point in points), points[0].name
        fix = f"uninstall one, or write 'distribution:{plain}'"
        raise CheckpointError(f"model {quoted(plain)} is registered by {owners}; {fix}")
    return _call(points[0])


def _points(name: str) -> list[EntryPoint]:
    distribution, _, plain = name.rpartition(":")
    points = [point for point in entry_points(group=GROUP) if point.name == plain]
    if distribution:
        points = [point for point in points if point.dist is not None and point.dist.name == distribution]
    return points


def _owner(point: EntryPoint) -> str:
    return "an unnamed distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _call(point: EntryPoint) -> Path:
    where = f"model {quoted(point.name)} of {_owner(point)} (entry point {point.value} in {GROUP})"
    try:
        path = point.load()()
    except CheckpointError:
        raise
    except Exception as error:  # the package's own code
        raise CheckpointError(
            f"{where} cannot be provided: {describe(error)}; repair or uninstall that package"
        ) from error
    if not isinstance(path, Path) or not path.exists():
        raise CheckpointError(f"{where} gave {quoted(path)}, not a path that exists; repair or uninstall that package")
    return path
