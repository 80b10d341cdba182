"""A model whose layers go through torch.compile: the tokens and logits of transformers, and the report of what ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import GREEDY, ids

from pluglm import Engine, RunConfig

PROMPTS = [[5, 6, 7, 8, 9], [11], list(range(20, 60))]
LOGPROB_TOLERANCE = 2e-4  # float32, sums in another order


def config(model: Path, **changes: Any) -> RunConfig:
    data = {
        "model": {"path": str(model), "dtype": "float32"},
        "backend": {"use": "cpu", "kernels": "torch", "compile": True},
        "engine": {"kv_memory": 1 << 22, "num_threads": 1},
    }
    return RunConfig.from_dict({**data, **changes})


def reference_logprobs(model: Path, token_ids: list[int]) -> torch.Tensor:
    """[tokens, V] of one forward pass of transformers."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model).float()(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits, -1)


def assert_as_transformers(model: Path, outputs: Any) -> None:
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output.token_ids) == GREEDY.max_tokens
        expected = reference_logprobs(model, [*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        assert expected.argmax(-1).tolist() == list(output.token_ids)
        for place, (token, row) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            assert row.logprob == pytest.approx(float(expected[place, token]), abs=LOGPROB_TOLERANCE)


def test_compiled_layers_give_the_tokens_and_logprobs_of_transformers(tiny_model: Path) -> None:
    with Engine.from_config(config(tiny_model)) as engine:
        outputs = engine.generate([ids(*prompt) for prompt in PROMPTS], GREEDY.model_copy(update={"logprobs": 0}))
        chosen = {one.operation: (one.kernel, dict(one.refused)) for one in engine.kernels}
    assert_as_transformers(tiny_model, outputs)
    assert chosen["decoder layer"] == ("torch.compile", {"native": "the config says kernels: torch"})
    assert chosen["head"][0] == "torch.compile"
    assert chosen["linear"][0] == "torch"
    assert chosen["linear"][1]["onednn packed"] == "torch.compile takes plain weights"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"quantizer": "int8"}, {"quantizer": "int4"}, {"attention": "sdpa", "kv_format": "int8"}]
)
def test_it_goes_with_what_else_may_be_swapped(tiny_model: Path, changes: dict[str, Any]) -> None:
    """Against the same run uncompiled, which the swap matrix compares with the reference."""
    results = []
    for compiled in (True, False):
        backend = {"use": "cpu", "kernels": "torch", "compile": compiled}
        with Engine.from_config(config(tiny_model, **changes, backend=backend)) as engine:
            outputs = engine.generate([ids(*prompt) for prompt in PROMPTS], GREEDY)
            results.append([list(output.token_ids) for output in outputs])
    assert results[0] == results[1]
