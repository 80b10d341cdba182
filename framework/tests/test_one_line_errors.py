"""What `SamplingParams` and `RunConfig` say to whoever makes them by hand: one line with the field and the fix."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pluglm import RunConfig, SamplingParams
from pluglm.assembly.run_config import EngineConfig, ModelConfig
from pluglm.assembly.validation import OneLineErrors
from pluglm.kernel.errors import ConfigError, PluglmError, RequestError


class Printless:
    def __repr__(self) -> str:
        raise RuntimeError("cannot be printed")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (SamplingParams, {"temperature": -1}, "temperature: Input should be greater than or equal to 0 (got -1)"),
        (SamplingParams, {"stop": ["a", ""]}, "stop.1: String should have at least 1 character (got '')"),
        (SamplingParams, {"tempreture": 1}, "tempreture: unknown key, did you mean 'temperature'?; known keys: allow"),
        (SamplingParams, {"n": 4, "best_of": 3}, "best_of 3 is below n 4; raise it, or lower n"),
        (SamplingParams, {"grammar": 3}, "grammar: Input should be a valid dictionary or instance of GrammarSpec (got"),
        (SamplingParams, {"seed": 10**5000}, "seed: Input should be less than 18446744073709551616 (got one of type"),
        (SamplingParams, {"n": Printless()}, "n: Input should be a valid integer (got one of type Printless)"),
        (EngineConfig, {"max_num_seqs": 0}, "max_num_seqs: Input should be greater than or equal to 1 (got 0)"),
        (ModelConfig, {"paht": "x"}, "paht: unknown key, did you mean 'path'?; known keys: dtype"),
        (RunConfig, {"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs: Input should be greater than or equal to 1"),
        (RunConfig, {"engin": {}}, "engin: unknown key, did you mean 'engine'?; known keys: attention"),
        (RunConfig, {"kv": 3}, "kv: write a component's name, or {use: NAME, ...its keys} (got 3)"),
    ],
)  # fmt: skip
def test_the_constructor_answers_in_one_line(kind: type[OneLineErrors], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PluglmError) as caught:
        kind(**fields)
    assert type(caught.value) is (RequestError if kind is SamplingParams else ConfigError)
    assert str(caught.value).startswith(f"{kind.__name__}: {message}")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_part_of_another_model_keeps_the_place_of_what_is_wrong() -> None:
    """pydantic's own form, by model_validate: the location leads through all models."""
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"sampling": {"temperature": -1, "top_p": 2}, "engine": {"num_threads": 0}})
    assert {error["loc"] for error in caught.value.errors()} == {
        ("sampling", "temperature"), ("sampling", "top_p"), ("engine", "num_threads"),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"^run.yaml: sampling.temperature: .* \(got -1\)$"):
        RunConfig.from_dict({"sampling": {"temperature": -1}}, source="run.yaml")
    with pytest.raises(ValidationError):
        TypeAdapter(list[SamplingParams]).validate_python([{"n": 0}])


def test_they_are_models_like_any_other() -> None:
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={3: 1.0})
    assert params == SamplingParams.model_validate(params.model_dump())
    assert hash(params) == hash(SamplingParams.model_validate_json(params.model_dump_json()))
    assert copy.deepcopy(params) == params
    assert params.model_fields_set == {"temperature", "stop", "logit_bias"}
    assert RunConfig(sampling=params).sampling is params
