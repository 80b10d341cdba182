"""Finds the entry that a config's name means; knows about loose files beside the config, which no metadata lists."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from pluglm.assembly.registry import Entry, find
from pluglm.kernel.errors import PluginError, describe


def locate(kinds: tuple[str, ...], name: str, folder: Path | None) -> Entry:
    """NAME, DISTRIBUTION:NAME, MODULE:CLASS or FILE.py:CLASS, files relative to `folder` (the config's).

    An importable module wins over a file of the same name. Raises PluginError when nothing matches.
    """
    entry = find(kinds, name)
    module, _, attribute = entry.target.rpartition(":")
    if entry.distribution is not None or _importable(module):
        return entry
    relative = module if module.endswith(".py") else module.replace(".", "/") + ".py"
    path = (folder or Path.cwd()) / relative
    if not path.is_file() or not attribute.isidentifier():
        raise PluginError(f"{kinds[0]} '{name}': no module '{module}' is installed and there is no file {path}")
    return Entry(kind=kinds[0], name=name, target=f"{_import_file(path)}:{attribute}", distribution=None, version=None)


def _importable(module: str) -> bool:
    try:
        return not module.endswith(".py") and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that is missing, or not a package
        return False


def _import_file(path: Path) -> str:
    """Import a file once per path under a private module name, which is returned. sys.path is not touched."""
    name = f"pluglm_loose_{re.sub(r'[^0-9A-Za-z]', '_', str(path.resolve()))}"
    if name in sys.modules:
        return name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file is somebody's code
        del sys.modules[name]
        raise PluginError(f"{path} cannot be imported: {describe(error)}") from error
    return name
