"""Speculation changes no token and no logprob; logprobs are those of transformers' float32 logits.

The references: the same run without a drafter (bit for bit, deterministic mode), and LlamaForCausalLM of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import ids, real_config, require_idle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pluglm import Engine, RequestOutput, SamplingParams

PROMPTS = ([9, 41, 77, 12, 30, 5, 18], [23], [60, 61, 62, 60, 61, 62, 60, 61], [7, 7, 7, 7])
KINDS = {
    "greedy": {"temperature": 0},
    "greedy penalties": {
        "temperature": 0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
    },
    "temperature": {"temperature": 0.9},
    "cold": {"temperature": 0.3},
    "top_k": {"temperature": 1.1, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "everything": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.1,
    },
    "grammar": {"temperature": 0.9, "grammar": {"regex": "(cat|dog|[0-9]{2})( (on|the|mat|log)){3,9}"}},
    "greedy grammar": {"temperature": 0, "grammar": {"regex": "(ab|abc|x[0-9]+){2,8}"}},
}
SEEDS = (0, 7, 2**64 - 1)


@pytest.fixture(scope="module")
def other(make_tiny_model: Callable[..., Path]) -> Path:
    """Another random model over the same tokenizer: nearly all of its drafts are refused."""
    return make_tiny_model("other", seed=1)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    with Engine.from_config(real_config(tiny_model, grammar="llguidance")) as engine:
        yield engine


@pytest.fixture(scope="module", params=["ngram", "same model", "other model", "own layers", "ngram, small budget"])
def drafted(request: Any, tiny_model: Path, other: Path) -> Iterator[Engine]:
    model = {"same model": tiny_model, "other model": other}.get(request.param)
    drafter = {"use": "draft_model", "model": str(model), "num_tokens": 3} if model else {"use": "ngram"}
    if request.param == "own layers":
        drafter = {"use": "self_layers", "num_layers": 1, "num_tokens": 3}
    limits = {"max_step_tokens": 6} if "small" in request.param else {}
    config = real_config(tiny_model, grammar="llguidance", drafter=drafter, engine=limits)
    with Engine.from_config(config) as engine:
        yield engine


def outputs_of(engine: Engine, kind: str, seed: int, **more: Any) -> list[RequestOutput]:
    params = {"max_tokens": 16, "seed": seed, "ignore_eos": True, "logprobs": 3, **KINDS[kind], **more}
    return engine.generate([ids(*prompt) for prompt in PROMPTS], SamplingParams.model_validate(params))


@pytest.fixture(scope="module")
def reference(plain: Engine) -> dict[tuple[str, int], list[RequestOutput]]:
    return {
        (kind, seed): outputs_of(plain, kind, seed) for kind in KINDS for seed in SEEDS[: 1 if "greedy" in kind else 3]
    }


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_texts_and_logprobs_are_those_without_a_drafter(
    drafted: Engine, reference: dict[tuple[str, int], list[RequestOutput]], kind: str
) -> None:
    for (one, seed), expected in reference.items():
        if one != kind:
            continue
        for output, wanted in zip(outputs_of(drafted, kind, seed), expected, strict=True):
            assert output.error is None
            assert (output.token_ids, output.text) == (wanted.token_ids, wanted.text)
            assert (output.finish_reason, output.stop) == (wanted.finish_reason, wanted.stop)
            assert output.logprobs == wanted.logprobs
    require_idle(drafted)


def test_the_drafts_of_the_same_model_are_all_accepted_when_greedy(tiny_model: Path) -> None:
    """Otherwise the equality above would say little: drafts must really be used."""
    drafter = {"use": "draft_model", "model": str(tiny_model), "num_tokens": 3}
    with Engine.from_config(real_config(tiny_model, drafter=drafter)) as engine:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        for output in engine.generate([ids(*prompt) for prompt in PROMPTS], params):
            assert output.metrics is not None
            assert output.metrics.num_drafted == output.metrics.num_accepted >= 11


@given(
    seed=st.integers(0, 2**64 - 1),
    prompt=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    temperature=st.sampled_from([0.0, 0.2, 1.0]),
    top_k=st.sampled_from([0, 1, 4]),
    penalty=st.sampled_from([1.0, 1.4]),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_prompt_any_seed(
    plain: Engine, drafted: Engine, seed: int, prompt: list[int], temperature: float, top_k: int, penalty: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, repetition_penalty=penalty, seed=seed, max_tokens=12, ignore_eos=True
    )
    wanted, output = (engine.generate(ids(*prompt), params)[0] for engine in (plain, drafted))
    assert output.token_ids == wanted.token_ids


@pytest.mark.parametrize("kind", ["greedy", "everything", "grammar"])
def test_logprobs_are_the_models_own(
    tiny_model: Path, reference: dict[tuple[str, int], list[RequestOutput]], kind: str
) -> None:
    """log_softmax of transformers' logits: no temperature, truncation, penalty or mask shows in them."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for prompt, output in zip(PROMPTS, reference[kind, 0], strict=True):
        with torch.inference_mode():
            logits_SV = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected_SV = logits_SV.double().log_softmax(-1)
        assert len(output.logprobs) == len(output.token_ids)
        for row_V, token, got in zip(expected_SV, output.token_ids, output.logprobs, strict=True):
            assert got.token_id == token
            assert got.logprob == pytest.approx(float(row_V[token]), abs=2e-4)
            assert got.rank == int((row_V > row_V[token]).sum()) + 1
            values, best = row_V.topk(3)
            assert list(got.top) == best.tolist()
            assert list(got.top.values()) == pytest.approx(values.tolist(), abs=2e-4)


@pytest.mark.parametrize(("wanted", "num_top"), [(None, None), (0, 0), (100, 100)])
def test_as_many_logprobs_as_asked_for(plain: Engine, wanted: int | None, num_top: int | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=wanted, ignore_eos=True)
    mate = params.model_copy(update={"logprobs": 1})
    output, beside = plain.generate([ids(9, 41), ids(9, 41)], [params, mate])
    assert [len(one.top) for one in output.logprobs] == ([] if num_top is None else [num_top] * 4)
    assert [len(one.top) for one in beside.logprobs] == [1] * 4
