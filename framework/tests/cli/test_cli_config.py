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


@pytest.mark.parametrize(
    ("sampler", "sets", "preset", "steps"),
    [
        ("{use: chain}", (), "component default", "component default"),
        ("{preset: vllm}", (), "file", "follows from other keys"),
        ("{steps: [top_k]}", (), "component default", "file"),
        ("{use: chain}", ("sampler.preset=joint",), "--set", "follows from other keys"),
        ("{use: chain}", ("sampler.steps=[]",), "component default", "--set"),
    ],
)
def test_steps_of_a_preset_do_not_look_as_if_they_were_given(
    pluglm, fake_config: Path, sampler: str, sets: tuple[str, ...], preset: str, steps: str
):
    fake_config.write_text(fake_config.read_text().replace("sampler: {use: chain}", f"sampler: {sampler}"))
    out = pluglm("config", "show", fake_config, *(word for one in sets for word in ("--set", one))).out
    origins = _origins(out)
    assert (origins["sampler.preset"], origins["sampler.steps"]) == (preset, steps)


@pytest.mark.parametrize(
    ("line", "sets", "origin"),
    [
        ("kv: {use: paged, block_size: 16}", (), "file"),
        ("kv: paged", (), "file"),
        ("kv: {block_size: 16}", (), "default"),
        ("", (), "default"),
        ("", ("kv.block_size=8",), "default"),
        ("kv: {block_size: 16}", ("kv.use=paged",), "--set"),
        ("kv: {block_size: 16}", ("kv={use: paged}",), "--set"),
        ("kv: {use: paged}", ("kv.block_size=8",), "file"),
    ],
)
def test_a_component_that_nobody_named_is_a_default(
    pluglm, fake_config: Path, line: str, sets: tuple[str, ...], origin: str
):
    fake_config.write_text(fake_config.read_text().replace("kv: {use: paged, block_size: 16}", line))
    out = pluglm("config", "show", fake_config, *(word for one in sets for word in ("--set", one))).out
    assert _origins(out)["kv.use"] == origin


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


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("sampler={steps: [top_k]}", "sampling.top_p=0.5"), "sampling: top_p=0.5 needs a logits step that is not in"),
        (("sampler.preset=vllm", "sampling.mirostat=2"), "sampling: mirostat=2 needs a logits step that is not in"),
        (("sampler=greedy",), "sampling: temperature=1.0 needs sampling: set temperature: 0 or sampler: chain"),
        (("sampling.grammar={regex: a}",), "sampling.grammar: no grammar is configured; add `grammar: {use: llg"),
        (("sampling.search={width: 2}",), "sampling.search: no search is configured; add `search: {use: beam}`"),
        (("sampling.search={width: 2}", "search=beam"), "sampling.search: a search draws nothing; set sampling.temp"),
        (("engine.plan_ahead=true", "backend=cpu"), "engine.plan_ahead: backend 'cpu' computes on the thread that"),
        (("engine.plan_ahead=true", "backend=cuda", "scheduler=fair"), "engine.plan_ahead: scheduler 'fair' cannot"),
        (("engine.plan_ahead=true", "backend=cuda", "drafter=ngram"), "engine.plan_ahead: drafter 'ngram' has its"),
    ],
    ids=str,
)
def test_check_tells_what_a_run_would_refuse(pluglm, fake_config: Path, sets: tuple[str, ...], message: str):
    outcome = pluglm("config", "check", fake_config, *(word for one in sets for word in ("--set", one)))
    assert outcome.code == 2
    assert message in outcome.error_lines[0]
    assert len(outcome.error_lines) == 1


@pytest.mark.parametrize(
    "sets",
    [
        ("sampler=greedy", "sampling.temperature=0"),
        ("sampler.steps=[]",),
        ("sampling.grammar={regex: a}", "grammar=llguidance"),
        ("sampling.search={width: 2}", "search=beam", "sampling.temperature=0"),
        ("engine.plan_ahead=true", "backend=cuda"),
        ("engine.plan_ahead=auto", "backend=cpu"),
    ],
    ids=str,
)
def test_check_lets_pass_what_a_run_takes(pluglm, fake_config: Path, sets: tuple[str, ...]):
    assert pluglm("config", "check", fake_config, *(word for one in sets for word in ("--set", one))).code == 0
