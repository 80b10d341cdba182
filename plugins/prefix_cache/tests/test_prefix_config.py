"""How the managers are configured: the eviction is a small component of its own, found and checked up front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pluglm.assembly.resolving import resolve
from pluglm.assembly.run_config import RunConfig
from pluglm.kernel.errors import ConfigError, PluginError
from pluglm.testing.context import make_context
from pluglm_prefix_cache.hash_prefix import HashPrefixKV
from pluglm_prefix_cache.lru import LruEviction
from pluglm_prefix_cache.radix import RadixKV

EVICTION = """
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.eviction import Eviction

class MineConfig(ComponentConfig):
    weight: float = 1.0

class Mine(Eviction):
    interface_version = 1
    Config = MineConfig

    def __init__(self, config, context):
        self.weight = config.weight

    def rank(self, block):
        return (self.weight * block.used_at,)
"""


@pytest.mark.parametrize("cls", [HashPrefixKV, RadixKV])
def test_lru_unless_told_otherwise(cls: Any) -> None:
    assert cls.uses(cls.Config()) == [("eviction", "lru", {})]
    manager = cls(cls.Config(), make_context())
    assert type(manager._cache.heap._eviction) is LruEviction


@pytest.mark.parametrize("kv", ["hash_prefix", "radix"])
def test_a_loose_file_serves_as_eviction(kv: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EVICTION, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        f"kv: {{use: {kv}, eviction: {{use: 'mine.py:Mine', weight: 2}}}}\n", encoding="utf-8"
    )
    run = resolve(RunConfig.from_file(tmp_path / "run.yaml"))
    assert run.slots["kv"].config.eviction.options == {"weight": 2}


@pytest.mark.parametrize(
    ("eviction", "error", "message"),
    [
        ("lur", PluginError, r"kv\.lur: eviction 'lur' is not installed, did you mean 'lru'\?; choices: lfu, long"),
        ({"use": "lru", "size": 3}, ConfigError, r"kv\.lru\.size: unknown key; known keys: none"),
        (3, ConfigError, r"kv\.eviction: .*write a component's name, or \{use: NAME, \.\.\.its keys\}"),
        ("fcfs", PluginError, r"eviction 'fcfs' is not installed"),
    ],
)
def test_a_wrong_eviction_is_one_line_before_weights_load(eviction: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        resolve(RunConfig.from_dict({"kv": {"use": "radix", "eviction": eviction}}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [{"block_size": 0}, {"num_blocks": 0}, {"evict": "lru"}, {"eviction": {"use": ""}}])
@pytest.mark.parametrize("cls", [HashPrefixKV, RadixKV])
def test_bad_config_is_refused(cls: Any, config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        cls.Config(**config)


@pytest.mark.parametrize(("cls", "name"), [(HashPrefixKV, "hash_prefix"), (RadixKV, "radix")])
def test_a_budget_too_small_names_the_manager(cls: Any, name: str) -> None:
    with pytest.raises(PluginError, match=rf"kv '{name}': 1 block\(s\) of 160 bytes .* the KV budget is 159"):
        cls(cls.Config(), make_context(kv_bytes=159, bytes_per_token=10))
