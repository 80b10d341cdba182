"""--set: YAML values at every depth, in order, over the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.cli.config_loading import parse_overrides
from pluglm.kernel.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", {"a": 1}),
        ("a.b=0.5", {"a.b": 0.5}),
        ("a.b.c=true", {"a.b.c": True}),
        ("a=", {"a": None}),
        ("a=null", {"a": None}),
        ("a=x=y", {"a": "x=y"}),
        ("a=[1, two]", {"a": [1, "two"]}),
        ("a={use: b, c: 1}", {"a": {"use": "b", "c": 1}}),
        ('a="\\n"', {"a": "\n"}),
    ],
)
def test_the_value_is_yaml(text: str, expected: dict[str, object]):
    assert parse_overrides([text]) == expected


@pytest.mark.parametrize("text", ["a", "=1", " =1", "a=[", "a=!!python/object:os.system {}", "a=*x"])
def test_a_malformed_override_is_refused_in_one_line(text: str):
    with pytest.raises(ConfigError, match="--set") as caught:
        parse_overrides([text])
    assert "\n" not in str(caught.value)


def test_the_last_of_two_wins_in_its_place():
    assert list(parse_overrides(["a.b=1", "a=2", "a.b=3"]).items()) == [("a", 2), ("a.b", 3)]


@settings(max_examples=50)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=8),
       lambda inner: st.lists(inner, max_size=3), max_leaves=5))  # fmt: skip
def test_whatever_yaml_writes_is_read_back(value: object):
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    assert parse_overrides([f"key={text}"]) == {"key": value}


def _shown(pluglm, config: Path, *sets: str) -> dict:
    outcome = pluglm("config", "show", config, *(part for one in sets for part in ("--set", one)))
    assert outcome.code == 0, outcome.err
    return yaml.safe_load(outcome.out)


def test_overrides_reach_every_depth_of_the_config(pluglm, fake_config: Path):
    shown = _shown(
        pluglm,
        fake_config,
        "attention=naive",
        "kv.block_size=4",
        "sampling.grammar.regex='[0-9]+'",
        "sampler.steps=[temperature, {use: top_p}]",
        "hooks=[{use: events, path: out.jsonl}]",
        "engine={max_num_seqs: 2}",
    )
    assert shown["attention"] == {"use": "naive"}
    assert shown["kv"]["block_size"] == 4
    assert shown["sampling"]["grammar"] == {"kind": "regex", "value": "[0-9]+"}
    assert shown["sampler"]["steps"] == [{"use": "temperature"}, {"use": "top_p"}]
    assert shown["hooks"] == [{"use": "events", "path": "out.jsonl"}]
    assert (shown["engine"]["max_num_seqs"], shown["engine"]["max_step_tokens"]) == (2, 512)


def test_naming_another_component_drops_the_keys_of_the_old_one(pluglm, fake_config: Path):
    assert "block_size" not in _shown(pluglm, fake_config, "kv.use=contiguous")["kv"]
