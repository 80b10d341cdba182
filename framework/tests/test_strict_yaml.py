"""The YAML of a config: what PyYAML would crash on, take silently or expand without end is one line instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm import RunConfig
from pluglm.assembly.strict_yaml import UnreadableYamlError, parse_yaml
from pluglm.cli.config_loading import parse_overrides
from pluglm.kernel.errors import ConfigError

BOMB = "b0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
HOSTILE = {
    "a key twice": ("a: 1\nb: 2\na: 3\n", r"key 'a' is given twice \(line 3, column 1\)"),
    "a nested key twice": ("a: {b: 1, b: 2}\n", "key 'b' is given twice"),
    "a month 99": ("a: 2020-99-99\n", "month must be in 1..12"),
    "a number of 6000 digits": (f"a: {'9' * 6000}\n", "4300 digits"),
    "open brackets without end": ("a: " + "[" * 100_000, "nested too deep"),
    "nested flow": ("a: " + "[" * 3000 + "]" * 3000, "nested too deep"),
    "nested blocks": ("".join(" " * depth + "a:\n" for depth in range(1500)), "nested too deep"),
    "an alias inside itself": ("a: &a [*a]\n", "an alias holds itself"),
    "aliases that multiply": (BOMB, "more than 1000000 values"),
}


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_is_one_line_in_a_file_and_in_an_override(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        RunConfig.from_file(file)
    assert str(error.value).startswith(f"{file}: not valid YAML: ")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=message):
        parse_overrides([f"key={text}"])


@pytest.mark.parametrize("text", ["false\n", "0\n", "[]\n", "''\n"])
def test_an_empty_value_is_no_empty_config(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="must be a mapping"):
        RunConfig.from_file(file)


def test_an_empty_file_is_an_empty_config(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing\n")
    assert RunConfig.from_file(file).model_dump() == RunConfig.from_dict({}).model_dump()


def test_aliases_and_merges_work_as_in_pyyaml() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n"
    assert parse_yaml(text) == yaml.safe_load(text) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": [{"x": 1, "y": 2}] * 2,
    }  # fmt: skip


@settings(max_examples=150)
@given(st.text(alphabet="a:-[]{}&*!<>'\"#|?, \n\t0", max_size=40))
def test_it_reads_or_refuses_whatever_the_text(text: str) -> None:
    refusal = ""
    try:
        data = parse_yaml(text)
    except UnreadableYamlError as error:
        refusal = str(error)
    else:
        assert data == yaml.safe_load(text)
    assert "\n" not in refusal


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("-2E3", -2000.0), ("1.5e+2", 150.0), ("1e", "1e")])
def test_numbers_with_an_exponent_are_numbers_as_in_yaml_1_2(text: str, value: float | str) -> None:
    """YAML 1.2, section 10.2.1.4."""
    assert parse_yaml(text) == value
    assert isinstance(parse_yaml(text), type(value))
