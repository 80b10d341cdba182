"""`collect_traces` takes configs and prompts as the Engine does, and refuses before weights what gives no traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from engine_cases import GREEDY, real_config

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.backends.torch_backend import TorchBackend
from pluglm.kernel.errors import ConfigError, RequestError
from pluglm_spec_decode.heads.collecting import collect_traces


@pytest.fixture(scope="module")
def model(make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model("traced")


def data_of(model: Path) -> dict[str, Any]:
    return {"model": {"path": str(model), "dtype": "float32"}, "backend": "cpu", "attention": "naive"}


def test_prompts_are_those_of_the_engine(model: Path) -> None:
    """A string is one prompt, not one for each of its characters."""
    with Engine.from_config(data_of(model)) as engine:
        (output,) = engine.generate("the same", GREEDY)
    text = [*output.prompt_token_ids, *output.token_ids]
    for prompts in ("the same", ["the same"], iter(["the same"]), {"prompt_token_ids": list(output.prompt_token_ids)}):
        (trace,) = collect_traces(data_of(model), prompts, GREEDY)
        assert trace.token_ids == text[:-2]
        assert len(trace.features_nD) == len(trace.token_ids) - 1
    with pytest.raises(RequestError, match="prompts must be a prompt or a list of them, not int"):
        collect_traces(data_of(model), 3, GREEDY)  # type: ignore[arg-type]


def test_configs_are_those_of_the_engine(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(data_of(model)))
    configs = (data_of(model), RunConfig.from_dict(data_of(model)), file, str(file))
    traces = [collect_traces(config, "the same", GREEDY)[0] for config in configs]
    for one in traces[1:]:
        assert one.token_ids == traces[0].token_ids
        assert torch.equal(one.features_nD, traces[0].features_nD)


@pytest.mark.parametrize(
    ("slots", "params", "says"),
    [
        ({"kv": "radix"}, {}, r"^config: kv 'radix' .* reuses prefixes, .*; use kv: paged$"),
        ({"kv": "hash_prefix"}, {}, r"kv 'hash_prefix' .* reuses prefixes"),
        ({"drafter": "ngram"}, {}, "leave drafter out of the config"),
        ({}, {"n": 2}, "^n is 2, and a trace is of the one output of a prompt; leave n out$"),
        ({}, {"best_of": 3}, "^best_of is 3, and a trace is"),
        ({}, {"max_tokens": 2}, "max_tokens is 2, and states are collected from 3 on"),
    ],
)
def test_what_gives_no_traces_is_refused_before_weights(
    model: Path, monkeypatch: pytest.MonkeyPatch, slots: dict[str, Any], params: dict[str, int], says: str
) -> None:
    monkeypatch.setattr(TorchBackend, "load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=says):
        collect_traces(real_config(model, **slots), "the same", SamplingParams(**{"max_tokens": 8, **params}))
