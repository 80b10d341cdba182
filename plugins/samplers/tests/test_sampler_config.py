"""How the samplers are configured and what they refuse, at start and at admission."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from sampler_cases import chain, context, resolve, row

from pluglm.kernel.errors import ComponentFailure, RequestError
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.logits_params import LogitsParams
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.chain import DEFAULT_STEPS, ChainConfig, ChainSampler
from pluglm_samplers.greedy import GreedySampler


def test_default_steps_are_installed_and_read_what_they_say() -> None:
    assert [use.use for use in ChainConfig().steps] == list(DEFAULT_STEPS)
    read: set[str] = set()
    for name in DEFAULT_STEPS:
        component: Any = resolve("logits_step", name, {})[0]
        read |= set(component.parameters)
        assert component.interface_version == 1
    assert read == set(LogitsParams.model_fields)  # no parameter is accepted and ignored


def test_names_and_mappings_reach_the_resolver() -> None:
    asked: list[tuple[str, str, dict[str, Any]]] = []

    def remember(kind: str, name: str, options: dict[str, Any]) -> tuple[type, Any]:
        asked.append((kind, name, options))
        return resolve(kind, "top_k", {})

    run = context(5)
    run.resolve_component = remember
    ChainSampler(ChainConfig.model_validate({"steps": ["top_k", {"use": "mine", "strength": 2}]}), run)
    assert asked == [("logits_step", "top_k", {}), ("logits_step", "mine", {"strength": 2})]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"steps": ["top_k", "top_k"]}, "top_k more than once"), ({"steps": [{"k": 1}]}, "use"), ({"step": []}, "step")],
)
def test_wrong_configs_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ChainConfig.model_validate(wrong)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"top_k": 5}, "top_k=5"), ({"min_p": 0.1}, "min_p=0.1"), ({"temperature": 0.5}, "temperature=0.5"),
        ({"temperature": 0.0, "frequency_penalty": 1.0}, "frequency_penalty=1.0"),
        ({}, None), ({"top_k": -1}, None), ({"top_p": 0.5}, None), ({"temperature": 0.0, "top_k": 5}, None),
    ],
)  # fmt: skip
def test_a_parameter_without_its_step_is_refused_at_admission(params: dict[str, Any], reason: str | None) -> None:
    answer = chain(5, steps=["top_p"]).check(SamplingParams(**params))
    assert (answer is None) if reason is None else (answer is not None and answer.startswith(reason))
    assert chain(5).check(SamplingParams(**params)) is None


@pytest.mark.parametrize("steps", [None, ["top_p"], ["temperature", {"use": "repetition_penalty", "window": 3}], []])
def test_what_is_refused_at_admission_is_refused_early(steps: list[Any] | None) -> None:
    """By the classes of the steps alone, in the same words."""
    config = ChainConfig.model_validate({} if steps is None else {"steps": steps})
    parts = [resolve(kind, name, dict(options))[0] for kind, name, options in ChainSampler.uses(config)]
    late = chain(5) if steps is None else chain(5, steps=steps)
    refused = 0
    for name, value in {"top_k": 5, "top_p": 0.5, "temperature": 0.5, "repetition_penalty": 2.0, "mirostat": 2}.items():
        params = SamplingParams.model_validate({name: value})
        assert ChainSampler.check_early(config, params, parts) == late.check(params)
        refused += late.check(params) is not None
    assert refused == (0 if steps is None else 5 - len(parts))


def test_greedy_sampler_refuses_what_it_would_ignore() -> None:
    sampler = GreedySampler(ComponentConfig(), context(4))
    logits_RV = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert sampler.sample(logits_RV, [row(SamplingParams(temperature=0.0, top_k=2))]) == [1]
    for params, named in (
        (SamplingParams(), "temperature=1.0"),
        (SamplingParams(temperature=0, presence_penalty=1), "pres"),
    ):
        assert str(sampler.check(params)).startswith(named)
        assert GreedySampler.check_early(ComponentConfig(), params, ()) == sampler.check(params)
        with pytest.raises(RequestError, match=named):
            sampler.sample(logits_RV, [row(params)])


class WrongShape:
    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    parameters: tuple[str, ...] = ()

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return True

    def apply(self, logits_RV: torch.Tensor, rows: Any) -> torch.Tensor:
        return logits_RV[:, :-1]


class Raises(WrongShape):
    def apply(self, logits_RV: torch.Tensor, rows: Any) -> torch.Tensor:
        raise KeyError("table")


@pytest.mark.parametrize(("step", "what"), [(WrongShape, "returned"), (Raises, "raised KeyError: 'table'")])
def test_a_step_that_breaks_its_contract_is_named(step: type[WrongShape], what: str) -> None:
    run = context(5)
    run.resolve_component = lambda kind, name, options: (step, ComponentConfig())
    sampler = ChainSampler(ChainConfig.model_validate({"steps": ["odd"]}), run)
    with pytest.raises(ComponentFailure, match=f"logits_step 'odd' {what}"):
        sampler.sample(torch.zeros(2, 5), [row(), row()])
