"""The memory plan of a run: made before weights are read, refused when it does not fit, shown by the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, ids, write_plugin

from pluglm import Engine, RunConfig
from pluglm.assembly.memory_plan import MemoryPlan
from pluglm.backends.cpu import CpuBackend
from pluglm.cli.main import main
from pluglm.kernel.errors import ConfigError, PluginError
from pluglm.weights.safetensors import SafetensorsCheckpoint

MIB = 1 << 20
# The tiny model: width 48, inner size 80, 4 heads of 12 and 2 kv heads, 2 layers, untied.
TOKEN_BYTES = 2 * 2 * 2 * 12 * 4


def config(model: Path, **engine: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "backend": {"use": "cpu", "kernels": "torch"},
            "attention": "naive",
            "engine": {"kv_memory": 1 << 20, **engine},
        }
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are read."""
    names: list[str] = []
    read = SafetensorsCheckpoint.tensor

    def spy(self: SafetensorsCheckpoint, name: str, dtype: Any) -> Any:
        names.append(name)
        return read(self, name, dtype)

    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", spy)
    return names


def test_the_plan_is_shown_before_a_tensor_is_read(tiny_model: Path, reads: list[str]) -> None:
    plans: list[tuple[MemoryPlan, int]] = []
    with Engine(config(tiny_model), planned=lambda plan: plans.append((plan, len(reads)))) as engine:
        assert plans == [(engine.memory_plan, 0)]
        assert reads
        vocab = engine.core.parts.runner.spec.vocab_size
    plan = plans[0][0]
    linear = 48 * 48 * 2 + 24 * 48 * 2 + 3 * 80 * 48
    assert plan.weights == 4 * (2 * vocab * 48 + 2 * (linear + 2 * 48) + 48)
    assert plan.num_blocks == (1 << 20) // (16 * TOKEN_BYTES)
    assert plan.kv == plan.num_blocks * 16 * TOKEN_BYTES
    assert (plan.step_tokens, plan.logit_rows) == (512, 16)


@pytest.mark.parametrize(
    ("free", "engine", "fix"),
    [
        (2 * MIB, {"kv_memory": 3 * MIB, "max_step_tokens": 64}, "lower engine.kv_memory to "),
        (100_000, {}, "take a smaller model, model.dtype: bfloat16 or a quantizer"),
        (700_000, {"max_step_tokens": 4096}, "lower engine.max_step_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_tensor_is_read(
    free: int, engine: dict[str, int], fix: str, tiny_model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "free_memory", lambda self: free)
    with pytest.raises(ConfigError) as caught:
        Engine(config(tiny_model, **engine))
    assert fix in str(caught.value)
    assert f"only {-(-free // MIB)} MiB are free" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert reads == []


def test_the_limit_that_the_refusal_names_is_one_that_fits(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "free_memory", lambda self: 2 * MIB)
    with pytest.raises(ConfigError) as caught:
        Engine(config(tiny_model, kv_memory=3 * MIB, max_step_tokens=64))
    limit = int(str(caught.value).split("lower engine.kv_memory to ")[1].split()[0])
    with Engine(config(tiny_model, kv_memory=limit, max_step_tokens=64)) as engine:
        assert engine.generate(ids(5, 6, 7), GREEDY)[0].finish_reason == "length"


def test_a_second_model_counts_too(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model has a pool of its own, which takes as much as that of the run's model or is refused."""
    with Engine(config(tiny_model)) as engine:
        alone = engine.memory_plan
    data = config(tiny_model).model_dump()
    drafted = RunConfig.from_dict({**data, "drafter": {"use": "draft_model", "model": str(tiny_model)}})
    with Engine(drafted) as engine:
        both = engine.memory_plan
    assert alone is not None
    assert both is not None
    assert both.kv == 2 * alone.kv
    assert both.logit_rows == 5 * alone.logit_rows
    monkeypatch.setattr(CpuBackend, "free_memory", lambda self: 1_000_000)
    with pytest.raises(ConfigError, match="MiB are free"):
        Engine(drafted)


DRAFTER = """
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter, Proposal

class Silent(Drafter):
    interface_version = 2

    def __init__(self, config, context):
        pass

    def propose(self, requests):
        return [Proposal([]) for _ in requests]

    def observe(self, sequence_id, num_accepted, token_ids):
        pass

    def release(self, sequence_id):
        pass

class OfTwo(Silent):
    @classmethod
    def most_tokens(cls, config):
        return 2

class OfWords(Silent):
    @classmethod
    def most_tokens(cls, config):
        return "two"

class Raising(Silent):
    @classmethod
    def most_tokens(cls, config):
        return 1 // 0
"""


def test_rows_are_planned_for_as_many_drafts_as_a_drafter_says(tiny_model: Path, tmp_path: Path) -> None:
    """One that says nothing may propose as much as a step has tokens."""
    write_plugin(tmp_path, DRAFTER)

    def rows(drafter: str | None, num_seats: int = 4, num_tokens: int = 64) -> int:
        data = config(tiny_model, max_num_seqs=num_seats, max_step_tokens=num_tokens).model_dump()
        with Engine(RunConfig.from_dict({**data, "drafter": drafter}, folder=tmp_path)) as engine:
            assert engine.memory_plan is not None
            return engine.memory_plan.logit_rows

    assert (rows(None), rows("plugin:OfTwo"), rows("plugin:Silent")) == (4, 12, 64)
    assert rows("plugin:OfTwo", num_seats=40) == 64
    with pytest.raises(PluginError, match=r"most_tokens\(\) must return an int from 0, not 'two'"):
        rows("plugin:OfWords")
    with pytest.raises(PluginError, match=r"most_tokens\(\) raised ZeroDivisionError"):
        rows("plugin:Raising")


def test_a_quantizer_makes_the_plan_smaller(tiny_model: Path) -> None:
    found: dict[str | None, int] = {}
    for quantizer in (None, "int8", "int4"):
        data = {**config(tiny_model).model_dump(), "quantizer": quantizer}
        with Engine(RunConfig.from_dict(data)) as engine:
            assert engine.memory_plan is not None
            found[quantizer] = engine.memory_plan.weights
    assert found["int4"] < found["int8"] < (found[None] or 0)


def test_the_fake_backend_has_neither_plan_nor_kernels(tiny_model: Path) -> None:
    with Engine(fake_config(tiny_model)) as engine:
        assert engine.memory_plan is None
        assert engine.kernels == ()


@pytest.mark.parametrize("quiet", [False, True])
def test_the_command_line_shows_plan_and_kernels_on_stderr(
    quiet: bool, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {{path: {tiny_model}, dtype: float32}}\nbackend: {{use: cpu, kernels: torch}}\n"
        "attention: naive\nsampling: {temperature: 0, max_tokens: 2}\nengine: {kv_memory: 1048576}\n"
    )
    arguments = ["run", str(run), "--prompt", "the cat", "--json", *(["--quiet"] if quiet else [])]
    monkeypatch.setattr(sys, "argv", ["pluglm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    if quiet:
        assert err == ""
        return
    lines = err.splitlines()
    assert lines[0].split() == ["memory", "MiB"]
    pool = (1 << 20) // (16 * TOKEN_BYTES)
    assert f"{pool} blocks of 16 tokens, when they are full" in err
    (linear,) = [line for line in lines if line.startswith("linear ")]
    assert "native: the config says kernels: torch" in linear
