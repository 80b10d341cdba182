"""A component whose own code calls sys.exit while the engine is built is an error that names it, not the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import fake_config, write_plugin

from pluglm import Engine
from pluglm.kernel.errors import PluginError

SOURCE = """
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig

class Leaving:
    interface_version = 1
    Config = ComponentConfig

    def __init__(self, *arguments):
        {constructor}

    def sample(self, logits_RV, rows):
        return []

    @classmethod
    def capabilities(cls, config):
        {capabilities}
"""


@pytest.mark.parametrize("where", ["constructor", "capabilities"])
def test_sys_exit_in_a_plugin_is_a_plugin_error(tiny_model: Path, tmp_path: Path, where: str) -> None:
    body = {"constructor": "pass", "capabilities": "return Capabilities()", where: "raise SystemExit(4)"}
    write_plugin(tmp_path, SOURCE.format(**body), "leaving")
    with pytest.raises(PluginError, match=r"leaving:Leaving.*SystemExit: 4"):
        Engine.from_config(fake_config(tiny_model, tmp_path, sampler="leaving:Leaving"))
