"""The eight plugin rules of docs/architecture.md, each against distributions that pip really installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pluglm import Engine, PluglmError, RunConfig, SamplingParams
from pluglm.assembly.registry import list_entries
from pluglm.assembly.resolving import require_same_plan, resolve
from pluglm.kernel.errors import ConfigError, IncompatibleError, PluginError

Install = Callable[..., Path]
ROOT = Path(__file__).parents[1]

GOOD = """
from pluglm.kernel.interfaces.attention import Attention
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm_attention.naive import NaiveAttention


class Config(ComponentConfig):
    strength: int = 1


class Good(Attention):
    Config = Config
    interface_version = 1

    def __init__(self, config, context):
        self._inner = NaiveAttention(NaiveAttention.Config(), context)

    @classmethod
    def capabilities(cls, config):
        return Capabilities(provides=frozenset({"numerics:batch_invariant"}))

    def plan(self, batch):
        return self._inner.plan(batch)

    def run(self, *args):
        return self._inner.run(*args)
"""


def attention(module: str, cls: str, name: str = "mine") -> dict[str, dict[str, str]]:
    return {"pluglm.attention": {name: f"{module}:{cls}"}}


def config_for(model: Path, **slots: Any) -> RunConfig:
    return RunConfig.from_dict({"model": {"path": str(model), "dtype": "float32"}, **slots}, source="run.yaml")


def one_line(error: pytest.ExceptionInfo[PluglmError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_rule_1_installing_changes_nothing_until_named(install: Install, tiny_model: Path) -> None:
    before = resolve(config_for(tiny_model)).plan()
    install(
        "broken-import",
        {"broken_import": "raise RuntimeError('cannot start')"},
        attention("broken_import", "X", "sdpa2"),
    )
    assert resolve(config_for(tiny_model)).plan() == before
    rows = [entry for entry in list_entries("attention") if entry.name == "sdpa2"]
    assert [(row.distribution, row.version) for row in rows] == [("broken-import", "1.0")]
    assert "broken_import" not in sys.modules


def test_rule_1_a_broken_package_named_fails_before_weights(install: Install, tmp_path: Path) -> None:
    """The model path does not exist: had anything been opened, the message would be about it."""
    install("broken-import", {"broken_import": "raise RuntimeError('cannot start')"}, attention("broken_import", "X"))
    with pytest.raises(PluginError) as error:
        Engine.from_config(config_for(tmp_path / "absent", attention="mine"))
    text = one_line(error)
    for part in ("run.yaml", "broken-import 1.0", "broken_import:X", "RuntimeError: cannot start"):
        assert part in text


@pytest.mark.parametrize(
    ("source", "cls", "says"),
    [
        ("X = 3", "X", "is not a class but int"),
        ("class X: interface_version = 1", "X", "lacks plan, run of Attention"),
        (
            GOOD.replace("ComponentConfig):\n", "ComponentConfig):\n    model_config = {'extra': 'allow'}\n"),
            "Good",
            "Config",
        ),
        ("", "Missing", "AttributeError"),
    ],
)
def test_rule_1_broken_at_class_check(
    install: Install, tiny_model: Path, source: str, cls: str, says: str, request: Any
) -> None:
    module = f"classcheck_{abs(hash(request.node.name)) % 10**8}"
    install("class-check", {module: source}, attention(module, cls))
    with pytest.raises(PluginError) as error:
        resolve(config_for(tiny_model, attention="mine"))
    text = one_line(error)
    assert says in text
    assert "class-check 1.0" in text


def test_rule_1_broken_at_build_keeps_the_cause(install: Install, tiny_model: Path) -> None:
    source = GOOD.replace(
        "self._inner = NaiveAttention(NaiveAttention.Config(), context)", "raise KeyError('no table')"
    )
    install("broken-build", {"broken_build": source}, attention("broken_build", "Good"))
    with pytest.raises(PluginError) as error:
        Engine.from_config(config_for(tiny_model, attention="mine"))
    text = one_line(error)
    assert "broken-build 1.0, broken_build:Good" in text
    assert "cannot be built: KeyError: 'no table'" in text


@pytest.mark.parametrize("order", [("alpha-dist", "beta-dist"), ("beta-dist", "alpha-dist")])
def test_rule_2_two_packages_claiming_one_name(install: Install, tiny_model: Path, order: tuple[str, str]) -> None:
    for name in order:
        module = name.replace("-", "_")
        install(name, {module: GOOD}, attention(module, "Good"))
    assert resolve(config_for(tiny_model)).slots["attention"].entry.name == "paged"
    with pytest.raises(PluginError) as error:
        resolve(config_for(tiny_model, attention="mine"))
    text = one_line(error)
    assert "alpha-dist 1.0" in text
    assert "beta-dist 1.0" in text
    assert "'alpha-dist:mine'" in text
    chosen = resolve(config_for(tiny_model, attention="beta_dist:mine")).slots["attention"].entry
    assert chosen.target == "beta_dist:Good"


def test_rule_2_unknown_name_lists_choices_and_the_nearest(tiny_model: Path) -> None:
    with pytest.raises(PluginError, match="'naiv' is not installed, did you mean 'naive'") as error:
        resolve(config_for(tiny_model, attention="naiv"))
    assert "choices: flash, naive, paged, sdpa" in one_line(error)


def test_rule_2_module_class_from_a_loose_file_beside_the_config(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "my_attention.py").write_text(GOOD)
    file = tmp_path / "run.yaml"
    for use in ("my_attention:Good", "./my_attention.py:Good"):
        model = f"model: {{path: {json.dumps(str(tiny_model))}, dtype: float32}}"
        file.write_text(f"{model}\nattention: {{use: '{use}', strength: 2}}\n")
        run = resolve(RunConfig.from_file(file))
        assert run.slots["attention"].config.strength == 2
        assert run.slots["attention"].entry.distribution is None
    with Engine.from_config(file) as engine, Engine.from_config(config_for(tiny_model, attention="naive")) as plain:
        params = SamplingParams(temperature=0, max_tokens=8)
        assert engine.generate("the cat", params)[0].token_ids == plain.generate("the cat", params)[0].token_ids
    file.write_text("attention: {use: 'no_such_file:Good'}\n")
    with pytest.raises(PluginError, match="no_such_file"):
        resolve(RunConfig.from_file(file))


def test_rule_2_a_loose_scheduling_policy_fills_the_scheduler_slot(tiny_model: Path, tmp_path: Path) -> None:
    source = "from pluglm_schedulers.fcfs import FcfsPolicy\nclass Mine(FcfsPolicy):\n    pass\n"
    (tmp_path / "my_policy.py").write_text(source)
    data = {"model": {"path": str(tiny_model), "dtype": "float32"}, "scheduler": "my_policy:Mine"}
    with Engine.from_config(RunConfig.from_dict(data, folder=tmp_path)) as engine:
        assert engine.run.slots["scheduler"].entry.kind == "scheduling_policy"
        assert engine.generate("the cat", SamplingParams(temperature=0, max_tokens=3))[0].finish_reason == "length"
    (tmp_path / "no_policy.py").write_text("class Mine:\n    interface_version = 1\n")
    with pytest.raises(PluginError, match="lacks admit"):
        resolve(RunConfig.from_dict({**data, "scheduler": "no_policy:Mine"}, folder=tmp_path))


def test_a_class_needs_no_base_class_and_no_capabilities(tiny_model: Path, tmp_path: Path) -> None:
    source = GOOD.replace("class Good(Attention):", "class Good:")
    start = source.index("    @classmethod")
    source = source[:start] + source[source.index("    def plan") :]
    (tmp_path / "plain_attention.py").write_text(source)
    data = {"model": {"path": str(tiny_model), "dtype": "float32"}, "attention": "plain_attention:Good"}
    with Engine.from_config(RunConfig.from_dict(data, folder=tmp_path)) as engine:
        assert engine.generate("the cat", SamplingParams(temperature=0, max_tokens=3))[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("steps", "says"),
    [(["tempreature"], "did you mean 'temperature'"), ([{"use": "top_k", "foo": 1}], "foo: unknown key")],
)
def test_rule_4_the_steps_of_a_sampler_are_checked_with_the_config(
    tiny_model: Path, steps: list[Any], says: str
) -> None:
    with pytest.raises(PluglmError, match=says):
        resolve(config_for(tiny_model, sampler={"steps": steps}))


@pytest.mark.parametrize("stated", ["interface_version = 2", "pass"])
def test_rule_3_wrong_interface_version(install: Install, tiny_model: Path, stated: str) -> None:
    module = f"version_{len(stated)}"
    install("old-plugin", {module: GOOD.replace("interface_version = 1", stated)}, attention(module, "Good"))
    with pytest.raises(PluginError, match="this pluglm speaks 1") as error:
        resolve(config_for(tiny_model, attention="mine"))
    assert "old-plugin 1.0" in one_line(error)


@pytest.mark.parametrize(
    ("text", "path", "nearest"),
    [
        ("attnetion: naive", "attnetion", "attention"),
        ("kv: {use: paged, blok_size: 16}", "kv.blok_size", "block_size"),
        ("sampling: {temprature: 1.0}", "sampling.temprature", "temperature"),
        ("sampling: {grammar: {kind: regex, vlaue: a}}", "sampling.grammar.vlaue", "value"),
        ("engine: {max_num_seq: 2}", "engine.max_num_seq", "max_num_seqs"),
    ],
)
def test_rule_4_unknown_keys_name_file_path_and_nearest(tmp_path: Path, text: str, path: str, nearest: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        resolve(RunConfig.from_file(file))
    message = one_line(error)
    assert str(file) in message
    assert f"{path}: unknown key, did you mean '{nearest}'?" in message


def test_rule_4_config_is_never_rewritten_and_auto_is_recorded(tiny_model: Path) -> None:
    config = config_for(tiny_model)
    before = config.model_dump_json()
    run = resolve(config)
    assert config.model_dump_json() == before
    assert config.backend.use == "auto"
    assert run.slots["backend"].entry.name in ("cpu", "cuda")
    if run.slots["backend"].entry.name == "cpu":
        assert run.auto["backend"]["cuda"]
    with pytest.raises(Exception, match="frozen"):
        config.attention = "naive"  # type: ignore[assignment,misc]


def test_rule_5_no_silent_fallback_and_the_pair_is_named(tiny_model: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        with pytest.raises(PluginError, match=r"backend 'cuda'.*cannot run on this machine"):
            Engine.from_config(config_for(tiny_model, backend="cuda"))
    with pytest.raises(IncompatibleError) as error:
        resolve(config_for(tiny_model, engine={"deterministic": True}, attention="sdpa"))
    text = one_line(error)
    assert "attention 'sdpa'" in text
    assert "engine.deterministic" in text


def test_rule_6_two_engines_with_different_plugins_live_together(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    with (
        Engine.from_config(config_for(tiny_model, attention="naive", kv="contiguous")) as first,
        Engine.from_config(config_for(tiny_model, attention="sdpa", kv={"use": "paged", "block_size": 4})) as second,
    ):
        streams = [first.stream("the dog sat", params), second.stream("the dog sat", params)]
        texts = ["", ""]
        for chunks in zip(*streams, strict=True):
            texts = [text + chunk.text for text, chunk in zip(texts, chunks, strict=True)]
        assert texts[0] == texts[1] != ""


def test_rule_6_importing_pluglm_reads_no_environment_and_imports_no_torch() -> None:
    code = (
        "import os, sys\n"
        "class Watch(dict):\n"
        "    def __getitem__(self, key):\n"
        "        assert not str(key).startswith('PLUGLM'), key\n"
        "        return super().__getitem__(key)\n"
        "import pluglm, pluglm.assembly.registry, pluglm.kernel.config\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rule_7_another_process_with_another_version_is_refused(install: Install, tiny_model: Path) -> None:
    site = install("versioned", {"versioned_plugin": GOOD}, attention("versioned_plugin", "Good"))
    mine = resolve(config_for(tiny_model, attention="mine")).plan()
    data = {"model": {"path": str(tiny_model), "dtype": "float32"}, "attention": "mine"}
    code = (
        "import json, sys\nfrom pluglm import RunConfig\nfrom pluglm.assembly.resolving import resolve\n"
        f"print(json.dumps(resolve(RunConfig.from_dict({data!r})).plan()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def worker() -> Any:
        run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
        return json.loads(run.stdout)

    require_same_plan(mine, worker())
    for old in site.glob("versioned-*"):
        old.rename(site.parent / old.name)
    install("versioned", {"versioned_plugin": GOOD}, attention("versioned_plugin", "Good"), version="1.1")
    with pytest.raises(PluginError, match=r"slot 'attention': version is '1.0' here and '1.1' there"):
        require_same_plan(mine, worker())


FAULTS = {
    "raises": ("raise ValueError('bad tile')", "raised ValueError: bad tile"),
    "hangs": ("import time; time.sleep(3)", "gave no answer within 1 s"),
    "nan": ("return q_TNH * float('nan')", "NaN"),
    "shape": ("return q_TNH[:, :1]", "returned [3, 1, 12] where [T, N, H] is [3, 4, 12]"),
    "dtype": ("return q_TNH.double()", "returned torch.float64 where the queries are torch.float32"),
    "nothing": ("return None", "returned NoneType, not a tensor"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rule_8_a_plugin_that_misbehaves_fails_its_requests_only(tiny_model: Path, tmp_path: Path, fault: str) -> None:
    """The plugin misbehaves for the prompt of three tokens only; the engine and other requests go on."""
    act, says = FAULTS[fault]
    body = f"def run(self, layer, q_TNH, k_TKH, v_TKH, plan, kv):\n        if len(q_TNH) == 3: {act}\n"
    body += "        return self._inner.run(layer, q_TNH, k_TKH, v_TKH, plan, kv)"
    (tmp_path / f"faulty_{fault}.py").write_text(
        GOOD.replace("def run(self, *args):\n        return self._inner.run(*args)", body)
    )
    data = {
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "attention": f"faulty_{fault}:Good",
        "engine": {"plugin_timeout_s": 1},
    }
    params = SamplingParams(temperature=0, max_tokens=6)
    with Engine.from_config(RunConfig.from_dict(data, folder=tmp_path)) as engine:
        good = engine.generate({"prompt_token_ids": [5, 6, 7, 8]}, params)[0]
        bad = engine.generate({"prompt_token_ids": [5, 6, 7]}, params)[0]
        again = engine.generate({"prompt_token_ids": [5, 6, 7, 8]}, params)[0]
    assert good.finish_reason == "length"
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert says in bad.error
    assert f"attention 'faulty_{fault}:Good'" in bad.error
    assert again.token_ids == good.token_ids
