"""`pluglm config show` and `check`: origins, a config that loads again, and plans that must agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pluglm import RunConfig
from pluglm.assembly.resolving import resolve


def _origins(out: str) -> dict[str, str]:
    """Section.key -> the comment behind its value."""
    found, section = {}, ""
    for line in out.splitlines():
        text, _, origin = line.partition("  # ")
        key = text.strip().removeprefix("- ").split(":")[0]
        section = key if not line.startswith(" ") else section
        found[key if not line.startswith(" ") else f"{section}.{key}"] = origin
    return found


def test_each_value_says_where_it_came_from(pluglm, fake_config: Path):
    out = pluglm("config", "show", fake_config, "--set", "kv.block_size=8", "--set", "attention=naive").out
    origins = _origins(out)
    assert origins["model.path"] == "file"
    assert origins["model.dtype"] == "default"
    assert origins["backend.use"] == "file"
    assert origins["backend.step_base_s"] == "component default"
    assert origins["kv.use"] == "file"
    assert origins["kv.block_size"] == "--set"
    assert origins["attention.use"] == "--set"
    assert origins["scheduler.use"] == "default"
    assert origins["sampling.seed"] == "file"
    assert origins["drafter"] == "default"


def test_auto_says_what_it_chose_and_what_it_passed_over(pluglm, fake_config: Path):
    out = pluglm("config", "show", fake_config, "--set", "backend.use=auto").out
    run = resolve(RunConfig.from_file(fake_config, {"backend.use": "auto"}))
    origin = _origins(out)["backend.use"]
    assert origin.startswith("auto (--set)")
    assert f"  use: pluglm:{run.slots['backend'].entry.name} " in out
    for name, reason in run.auto["backend"].items():
        assert f"not {name}: {reason}" in origin


def test_what_show_prints_is_a_config_of_the_same_plan(pluglm, configs: Path, tmp_path: Path):
    for config in sorted(configs.glob("*.yaml")):
        again = tmp_path / config.name
        again.write_text(pluglm("config", "show", config).out)
        first, second = RunConfig.from_file(config), RunConfig.from_file(again)
        assert resolve(second).plan() == resolve(first).plan()
        assert (second.sampling, second.engine, second.model) == (first.sampling, first.engine, first.model)


@pytest.mark.parametrize(("backend", "key", "value"), [("cpu", "kernels", "torch"), ("cuda", "graphs", False)])
def test_keys_that_rule_others_out_stand_beside_their_defaults(
    pluglm, fake_config: Path, tmp_path: Path, backend: str, key: str, value: str | bool
):
    """What show prints has every default spelled out, which must not read as a wish for something that is off."""
    again = tmp_path / "again.yaml"
    sets = ("--set", f"backend.use={backend}", "--set", f"backend.{key}={json.dumps(value)}")
    again.write_text(pluglm("config", "show", fake_config, *sets).out)
    assert resolve(RunConfig.from_file(again)).plan()["backend"]["config"][key] == value


def test_text_of_several_lines_is_shown_on_one(pluglm, fake_config: Path, tmp_path: Path):
    out = pluglm("config", "show", fake_config, "--set", 'sampling.stop=["\\n\\n", "a # b", "it\'s"]').out
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert RunConfig.from_file(again).sampling.stop == ("\n\n", "a # b", "it's")


def test_check_accepts_its_own_plan_and_names_the_slot_that_differs(pluglm, fake_config: Path, tmp_path: Path):
    plan = tmp_path / "plan.json"
    plan.write_text(pluglm("config", "show", fake_config, "--plan").out)
    assert json.loads(plan.read_text()) == resolve(RunConfig.from_file(fake_config)).plan()
    assert pluglm("config", "check", fake_config, "--expect", plan).code == 0
    other = pluglm("config", "check", fake_config, "--expect", plan, "--set", "kv.block_size=8")
    assert other.code == 2
    assert "slot 'kv'" in other.error_lines[0]


def test_check_refuses_a_file_that_is_no_plan(pluglm, fake_config: Path, tmp_path: Path):
    plan = tmp_path / "plan.json"
    plan.write_text("[1]")
    outcome = pluglm("config", "check", fake_config, "--expect", plan)
    assert outcome.code == 2
    assert "is no plan" in outcome.error_lines[0]


def test_check_names_a_pair_that_cannot_work_together(pluglm, fake_config: Path):
    outcome = pluglm("config", "check", fake_config, "--set", "quantizer.use=int8")
    assert outcome.code == 2
    assert "backend 'fake'" in outcome.error_lines[0]
    assert "quantizer 'int8'" in outcome.error_lines[0]
