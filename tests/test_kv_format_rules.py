"""KV formats at start-up: what is refused and why, what the memory plan counts, who is named when one fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, real_config, vocab_size, write_plugin
from kv_format_cases import FORMATS

from pluglm import Engine, RunConfig
from pluglm.cli.main import main
from pluglm.kernel.errors import ConfigError, IncompatibleError, PluginError
from pluglm.kernel.interfaces.kv_format import stored_parts

VALUES = 2 * 2 * 2  # of the tiny model: layers, keys and values, kv heads, each of 12 numbers
PLUGIN = """
from dataclasses import replace
from pluglm.backends.cpu import CpuBackend
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.testing.kv_formats import NibbleKV
from pluglm_attention.naive import NaiveAttention


class Quiet(NibbleKV):
    @classmethod
    def capabilities(cls, config):
        return Capabilities()


class Raises(NibbleKV):
    def decode(self, codes, scales):
        raise ValueError("no codes today")


class NoRow(NibbleKV):
    def row(self, head_dim):
        return (head_dim, "int8")


class NamesItsTypes(NibbleKV):
    def row(self, head_dim):
        return replace(super().row(head_dim), code_dtype="uint8")


class Halves(NibbleKV):
    def row(self, head_dim):
        return replace(super().row(head_dim), num_codes=head_dim / 2)


class StoresNothing(NibbleKV):
    def row(self, head_dim):
        return replace(super().row(head_dim), num_codes=0)


class Miscounts(NibbleKV):
    def row(self, head_dim):
        return replace(super().row(head_dim), num_codes=head_dim)


class ForgetsWhatItSaid(NibbleKV):
    def encode(self, x_TKH):
        codes, scales = super().encode(x_TKH)
        return codes, scales.double()


class OneHead(NibbleKV):
    def decode(self, codes, scales):
        return super().decode(codes, scales)[:, :1]


class OneNumber(NibbleKV):
    def decode(self, codes, scales):
        return super().decode(codes, scales)[..., :1]


class Doubles(NibbleKV):
    def decode(self, codes, scales):
        return super().decode(codes, scales).double()


class CannotSay(NibbleKV):
    def row(self, head_dim):
        raise KeyError(head_dim)


class Deaf(NaiveAttention):
    @classmethod
    def capabilities(cls, config):
        return Capabilities()


class Plain(CpuBackend):
    allocate_encoded_kv = None
"""


def run_config(model: Path, folder: Path | None = None, /, **slots: Any) -> RunConfig:
    data = {"model": {"path": str(model), "dtype": "float32"}, "backend": "cpu", "engine": {"num_threads": 1}}
    return RunConfig.from_dict({**data, **slots}, folder=folder)


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    return write_plugin(tmp_path, PLUGIN, "kv_format_rules")


def test_without_the_slot_nothing_is_encoded(tiny_model: Path) -> None:
    with Engine(real_config(tiny_model)) as engine:
        runner = engine._core.parts.runner
        assert [str(one.dtype) for one in stored_parts(runner.store, 0)] == ["torch.float32"] * 2


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("backend", ["cpu", {"use": "cpu", "kernels": "torch"}], ids=["native", "torch"])
@pytest.mark.parametrize("kv", ["paged", "contiguous", "window_paged", "radix"])
def test_the_plan_counts_what_is_stored(tiny_model: Path, kv_format: str, backend: Any, kv: str) -> None:
    """12 codes and 4 bytes of scale for each row of 12 numbers; the pool holds three times the tokens of float32."""
    most, tokens = 50_000, {}
    for name, row_bytes in ((None, 48), (kv_format, 16)):
        engine_keys = {"num_threads": 1, "kv_memory": most, "max_num_seqs": 64}
        config = run_config(
            tiny_model,
            kv_format=name,
            kv=kv,
            backend=backend,
            engine=engine_keys,
            model={"path": str(tiny_model), "dtype": "float32", "max_model_len": 40},
        )
        with Engine(config) as engine:
            runner, plan = engine._core.parts.runner, engine.memory_plan
            assert plan is not None
            tokens[name] = plan.num_blocks * plan.block_size
            assert plan.kv == tokens[name] * VALUES * row_bytes <= most
            held = sum(one.nbytes for layer in (0, 1) for one in stored_parts(runner.store, layer))
            assert held == plan.kv
    assert tokens[kv_format] >= 3 * tokens[None]


def test_a_simulation_sizes_the_pool_by_the_format(tiny_model: Path) -> None:
    """The fake backend stores no numbers, and its words are those of its docstring in any format."""
    blocks = {}
    for kv_format in (None, "int8"):
        with Engine(fake_config(tiny_model, kv_format=kv_format, engine={"kv_memory": 100_000})) as engine:
            blocks[kv_format] = engine._core.kv.layout.num_blocks
            (output,) = engine.generate(ids(5, 6, 7), GREEDY)
            assert output.token_ids == fake_tokens([5, 6, 7], 8, vocab_size(engine))
    assert blocks == {None: 100_000 // (16 * VALUES * 48), "int8": 100_000 // (16 * VALUES * 16)}


def refusal(config: RunConfig) -> str:
    with pytest.raises(IncompatibleError) as caught:
        Engine(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_attention_that_reads_numbers_only_is_refused(tiny_model: Path, tmp_path: Path, plugin: str) -> None:
    message = refusal(run_config(tiny_model, tmp_path, kv_format="int8", attention=f"{plugin}:Deaf"))
    assert message.startswith("kv_format 'int8' (pluglm-quant")
    assert "Deaf" in message
    assert "does not provide 'attention:kv_formats'" in message
    assert "leave kv_format out" in message


def test_a_backend_that_stores_numbers_only_is_refused(tiny_model: Path, tmp_path: Path, plugin: str) -> None:
    message = refusal(run_config(tiny_model, tmp_path, kv_format="int8", backend=f"{plugin}:Plain"))
    assert "kv_format 'int8'" in message
    assert "Plain" in message
    assert "keeps KV in the run's dtype only" in message


@pytest.mark.parametrize("attention", ["flash", "paged"])
def test_the_native_kernel_is_refused_by_name(tiny_model: Path, attention: str) -> None:
    message = refusal(run_config(tiny_model, kv_format="int8", attention={"use": attention, "kernel": "native"}))
    assert f"attention '{attention}'" in message
    assert "it reads and writes keys and values in the run's dtype" in message
    assert "set attention.kernel: auto" in message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NoRow", "it gave tuple, not KVRow"),
        ("NamesItsTypes", "code_dtype is 'uint8', not a torch dtype"),
        ("Halves", "num_codes is 6.0, not a whole number from 1"),
        ("StoresNothing", "num_codes is 0, not a whole number from 1"),
        ("Miscounts", "gave codes [1, 1, 6] of torch.uint8 where [1, 1, 12] of torch.uint8 are stored"),
        ("ForgetsWhatItSaid", "gave scales [1, 1, 2] of torch.float64 where [1, 1, 2] of torch.bfloat16 are stored"),
        ("CannotSay", "cannot store heads of 12: KeyError: 12"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "fake"])
def test_a_format_that_misstates_what_it_stores_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, plugin: str, name: str, reason: str, backend: str
) -> None:
    with pytest.raises(PluginError) as caught:
        Engine(run_config(tiny_model, tmp_path, kv_format=f"{plugin}:{name}", backend=backend))
    assert str(caught.value).startswith(f"kv_format '{plugin}:{name}' (")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_deterministic_run_takes_formats_that_promise_the_same_bits(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    message = refusal(real_config(tiny_model, tmp_path, kv_format=f"{plugin}:Quiet"))
    assert "cannot run with engine.deterministic: it does not provide 'numerics:batch_invariant'" in message
    with Engine(run_config(tiny_model, tmp_path, kv_format=f"{plugin}:Quiet")) as engine:
        assert engine.generate(ids(5, 6, 7), GREEDY)[0].finish_reason == "length"


def test_a_name_that_nobody_has(tiny_model: Path) -> None:
    with pytest.raises(PluginError, match=r"kv_format: kv_format 'int4' is not installed.*choices: fp8, int8"):
        Engine(run_config(tiny_model, kv_format="int4"))
    with pytest.raises(ConfigError, match=r"kv_format\.scale: unknown key"):
        Engine(run_config(tiny_model, kv_format={"use": "int8", "scale": 1}))


def test_a_format_that_raises_is_named(tiny_model: Path, tmp_path: Path, plugin: str) -> None:
    with Engine(run_config(tiny_model, tmp_path, kv_format=f"{plugin}:Raises")) as engine:
        (output,) = engine.generate(ids(5, 6, 7), GREEDY)
        assert output.finish_reason == "error"
        assert output.error is not None
        assert f"kv_format '{plugin}:Raises' raised ValueError: no codes today" in output.error


@pytest.mark.parametrize("attention", ["naive", "sdpa", "paged"])
@pytest.mark.parametrize(
    ("name", "gave"),
    [("OneHead", r"numbers \[\d+, 1, 12\] of torch.float32"), ("OneNumber", r"numbers \[\d+, 2, 1\]"),
     ("Doubles", r"numbers \[\d+, 2, 12\] of torch.float64")],
)  # fmt: skip
def test_what_a_format_decodes_is_not_broadcast(
    tiny_model: Path, tmp_path: Path, plugin: str, attention: str, name: str, gave: str
) -> None:
    with Engine(run_config(tiny_model, tmp_path, kv_format=f"{plugin}:{name}", attention=attention)) as engine:
        (output,) = engine.generate(ids(5, 6, 7), GREEDY)
        assert output.finish_reason == "error"
        assert re.match(rf"kv_format '{plugin}:{name}' gave {gave}", str(output.error))


def test_a_draft_model_is_stored_in_the_format_too(tiny_model: Path, make_tiny_model: Callable[..., Path]) -> None:
    draft = make_tiny_model("kv-format-draft", seed=1)
    drafter = {"use": "draft_model", "model": str(draft), "num_tokens": 3}
    with Engine(run_config(tiny_model, kv_format="int8", drafter=drafter)) as engine:
        drafted: Any = engine._core.parts.drafter
        stores = [one.store for one in vars(drafted).values() if hasattr(one, "store")]
        assert [str(one.dtype) for one in stored_parts(stores[0], 0)] == ["torch.int8"] * 2 + ["torch.float32"] * 2


def test_the_command_line_shows_format_kernel_and_plan(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {{path: {tiny_model}, dtype: float32}}\nbackend: cpu\nkv_format: int8\n"
        "sampling: {temperature: 0, max_tokens: 2}\nengine: {kv_memory: 100000}\n"
    )
    monkeypatch.setattr(sys, "argv", ["pluglm", "run", str(run), "--prompt", "the cat"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    err = " ".join(capsys.readouterr().err.split())
    assert f"{100_000 // (16 * VALUES * 16)} blocks of 16 tokens, when they are full" in err
    assert "kv_format int8 pluglm-quant" in err
    assert "paged attention torch" in err
    assert "and the run has a KV format" in err
