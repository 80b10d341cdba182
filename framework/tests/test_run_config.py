"""Reading a run's config: defaults of slots, overrides by key path, and where a value came from."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from pluglm import RunConfig
from pluglm.kernel.errors import ConfigError


def test_keys_without_use_mean_the_default_component() -> None:
    config = RunConfig.from_dict({"kv": {"block_size": 8}, "sampler": {"steps": ["temperature"]}})
    assert (config.kv.use, config.kv.options) == ("paged", {"block_size": 8})
    assert (config.sampler.use, config.sampler.options) == ("chain", {"steps": ["temperature"]})
    assert RunConfig.model_validate({"kv": {"block_size": 8}}).kv == config.kv


def test_a_slot_without_a_default_needs_use() -> None:
    """The choices are those of the installed packages' metadata."""
    for slot, kind in (("drafter", "drafter"), ("grammar", "grammar"), ("kv_tiers", "kv_tier"), ("hooks", "hooks")):
        installed = ", ".join(sorted({point.name for point in entry_points(group=f"pluglm.{kind}")}))
        is_list = slot in ("kv_tiers", "hooks")
        with pytest.raises(ConfigError) as caught:
            RunConfig.from_dict({slot: [{"num_tokens": 2}] if is_list else {"num_tokens": 2}})
        key = f"{slot}.0" if is_list else slot
        assert str(caught.value) == f"config: {key}.use: it is required; choices: {installed}"


def test_a_rule_of_several_keys_is_told_without_all_of_them() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({"sampling": {"min_tokens": 9, "max_tokens": 3}})
    assert str(caught.value) == "config: sampling: min_tokens 9 is above max_tokens 3; lower it"


def test_an_override_sets_one_key_and_keeps_the_rest() -> None:
    data = {"kv": {"use": "paged", "block_size": 8}}
    config = RunConfig.from_dict(data, {"kv.num_blocks": 5, "sampling.temperature": 0, "engine.max_num_seqs": 2})
    assert config.kv.options == {"block_size": 8, "num_blocks": 5}
    assert config.sampling.temperature == 0
    assert config.engine.max_num_seqs == 2
    assert config.overridden == {"kv.num_blocks", "sampling.temperature", "engine.max_num_seqs"}
    assert data == {"kv": {"use": "paged", "block_size": 8}}


@pytest.mark.parametrize(
    "data", [{"kv": {"use": "paged", "block_size": 8}}, {"kv": {"block_size": 8}}, {"kv": "paged"}, {}]
)
def test_naming_another_component_drops_the_replaced_ones_keys(data: dict[str, object]) -> None:
    config = RunConfig.from_dict(data, {"kv.use": "contiguous", "kv.region_tokens": 64})
    assert (config.kv.use, config.kv.options) == ("contiguous", {"region_tokens": 64})


def test_naming_the_same_component_keeps_its_keys() -> None:
    for data in ({"kv": {"use": "paged", "block_size": 8}}, {"kv": {"block_size": 8}}):
        assert RunConfig.from_dict(data, {"kv.use": "paged"}).kv.options == {"block_size": 8}


def test_an_override_on_a_missing_slot_means_its_default() -> None:
    assert RunConfig.from_dict({}, {"kv.block_size": 4}).kv.model_dump() == {"use": "paged", "block_size": 4}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kv..x": 1}, "empty key"),
        ({"model.path.x": 1}, "'path' is not a mapping"),
        ({"sampling.temperature": -1}, r"with sampling\.temperature set over it.*sampling\.temperature"),
        ({"engnie.max_num_seqs": 1}, "did you mean 'engine'"),
    ],
)
def test_a_wrong_override_is_one_line(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        RunConfig.from_dict({"model": {"path": "x"}}, overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "must be a mapping"),
        ("a: [\n", "not valid YAML"),
        ("a: !!python/object:os.system x\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        RunConfig.from_file(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_binary_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.from_file(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.from_file(tmp_path / "binary.yaml")


@pytest.mark.parametrize("count", [1025, 2**31, 10**30])
def test_a_thread_count_that_openmp_would_die_of_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=r"engine\.num_threads: Input should be less than or equal to 1024"):
        RunConfig.from_dict({"engine": {"num_threads": count}})


@pytest.mark.parametrize("seconds", [float("inf"), 1e308])
def test_a_plugin_timeout_past_what_python_can_wait_for_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"engine\.plugin_timeout_s"):
        RunConfig.from_dict({"engine": {"plugin_timeout_s": seconds}})
