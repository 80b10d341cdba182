"""What a config names is looked for before anything is built: the model's path or name, and the files of components."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, write_plugin

from pluglm import Engine, RunConfig
from pluglm.assembly.named_files import check_files, check_model_name
from pluglm.assembly.resolving import resolve
from pluglm.kernel.errors import CheckpointError, PluginError
from pluglm.testing.context import small_spec
from pluglm_spec_decode.heads.settings import head_config

PLUGIN = """
from pluglm.kernel.errors import ConfigError
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.drafter import Proposal

class Config(ComponentConfig):
    is_broken: bool = False
    models: object = ()

class Reader:
    interface_version = 2
    Config = Config

    def __init__(self, config, context): raise AssertionError("it was built")

    @classmethod
    def capabilities(cls, config): return Capabilities()

    @classmethod
    def check_files(cls, config):
        if config.is_broken: raise KeyError("x")
        if not config.models: raise ConfigError("drafter 'reader': there is no table.bin; make one")

    @classmethod
    def named_models(cls, config): return config.models

    def propose(self, requests): return [Proposal([]) for _ in requests]
    def observe(self, sequence_id, num_accepted, token_ids): pass
    def release(self, sequence_id): pass
"""


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """A folder with the config.json of a head of each kind; no weights."""
    for kind, num_blocks in (("eagle", 1), ("mtp", 2)):
        (tmp_path / kind).mkdir()
        config = head_config(kind, small_spec(), num_blocks=num_blocks)
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        ({"use": "eagle_head", "model": "none/here"}, "there is no folder none/here; train a head (docs/drafters.md)"),
        ({"use": "mtp_head", "model": "eagle"}, "eagle/config.json is a head of kind eagle; use eagle_head for it"),
        ({"use": "mtp_head", "model": "mtp", "num_tokens": 3}, "num_tokens is 3 and mtp has 2 blocks; set num_tokens"),
    ],
)
def test_a_head_that_cannot_serve_is_refused_before_the_model_is_opened(
    heads: Path, monkeypatch: pytest.MonkeyPatch, drafter: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(heads)
    config = fake_config(heads / "no_model_here", drafter=drafter)
    for use in (lambda: check_files(resolve(config)), lambda: Engine.from_config(config)):
        with pytest.raises(PluginError) as caught:
            use()
        assert str(caught.value).startswith(f"config: drafter '{drafter['use']}': ")
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("use", ["draft_model", "universal"])
def test_a_draft_model_that_is_nowhere_is_refused_before_anything_is_built(tmp_path: Path, use: str) -> None:
    config = fake_config(tmp_path / "no_model_here", drafter={"use": use, "model": "nothere"})
    for start in (lambda: check_files(resolve(config)), lambda: Engine.from_config(config)):
        with pytest.raises(PluginError) as caught:
            start()
        assert str(caught.value).startswith(
            f"config: drafter '{use}': model 'nothere' is no path, no registered name ("
        )
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "drafter",
    [
        {"use": "eagle_head", "model": "eagle"},
        {"use": "mtp_head", "model": "mtp"},
        {"use": "draft_model", "model": "smollm2-135m-instruct"},
        {"use": "universal", "model": "eagle"},  # a folder: what is in it shows when it is opened
        {"use": "draft_model", "model": "org/name"},
        "ngram",
    ],
)
def test_what_may_serve_passes(heads: Path, monkeypatch: pytest.MonkeyPatch, drafter: Any) -> None:
    monkeypatch.chdir(heads)
    check_files(resolve(fake_config(heads, drafter=drafter)))


@pytest.mark.parametrize(
    ("is_broken", "says"),
    [
        (False, "^config: drafter 'reader': there is no table.bin; make one$"),
        (True, r"^drafter 'plugin:Reader' .*: check_files\(\) raised KeyError: 'x'$"),
    ],
)
def test_any_component_may_look_at_its_files(tmp_path: Path, is_broken: bool, says: str) -> None:
    use = f"{write_plugin(tmp_path, PLUGIN)}:Reader"
    run = resolve(fake_config(tmp_path, tmp_path, drafter={"use": use, "is_broken": is_broken}))
    with pytest.raises(PluginError, match=says):
        check_files(run)


def test_a_component_that_does_not_name_models_right_is_named(tmp_path: Path) -> None:
    use = f"{write_plugin(tmp_path, PLUGIN)}:Reader"
    run = resolve(fake_config(tmp_path, tmp_path, drafter={"use": use, "models": 7}))
    with pytest.raises(PluginError, match=r"named_models\(\) raised TypeError: 'int' object is not iterable$"):
        check_files(run)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"path": "nothere"}, "config: model.path: model 'nothere' is no path, no registered name ("),
        ({"path": "./nothere"}, "config: model.path: model './nothere': no such file or folder; check the path"),
        ({"revision": "v1"}, "config: model.path: model 'smollm2-135m-instruct' is not a hub id, so revision 'v1'"),
    ],
)
def test_a_model_that_is_nowhere(model: dict[str, str], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_model_name(resolve(RunConfig.from_dict({"model": model})))
    assert str(caught.value).startswith(says)
    check_model_name(resolve(RunConfig()))
    check_model_name(resolve(RunConfig.from_dict({"model": {"path": "org/name"}})))
