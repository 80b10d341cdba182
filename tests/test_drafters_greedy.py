"""Greedy text is the same with every drafter: alone, in batches, with a prefix cache, and when seats are taken away.

The reference is plain decoding of one request at a time. Deterministic float32, so equal means every token.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import ids, real_config, write_plugin
from seat_cases import TAKING_SOURCE

from pluglm import Engine, RequestOutput, SamplingParams
from pluglm_spec_decode.heads.collecting import Trace, collect_traces
from pluglm_spec_decode.heads.distilling import distill
from pluglm_spec_decode.heads.module import DraftHead
from pluglm_spec_decode.heads.settings import head_config
from pluglm_spec_decode.heads.teacher import load_teacher

SMOLLM2 = "smollm2-135m-instruct"
OWN = "of the target"  # stands for the target's path: a draft model must have its vocabulary
MOST = "most of the target's"  # stands for a number of its layers
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"use": "ngram"},
    "ngram, adaptive": {"use": "ngram", "num_tokens": 8, "adaptive": True, "draft_cost": 0.1},
    "suffix": {"use": "suffix"},
    "suffix, branches": {"use": "suffix", "num_branches": 3},
    "suffix, adaptive by the clock": {"use": "suffix", "adaptive": True},
    "self_layers": {"use": "self_layers", "num_layers": MOST, "num_tokens": 2},
    "draft_model": {"use": "draft_model", "model": OWN, "num_tokens": 3},
    "draft_model, adaptive": {
        "use": "draft_model", "model": OWN, "num_tokens": 3, "adaptive": True, "draft_cost": 0.1
    },
    "universal": {"use": "universal", "model": OWN, "num_tokens": 3},
}  # fmt: skip


def run(
    model: str, folder: Path, prompts: list[Any], max_tokens: int, batch: int = 1, taking: bool = False, **slots: Any
) -> list[RequestOutput]:
    """The prompts in groups of `batch`. taking: seats are taken away."""
    if taking:
        write_plugin(folder, TAKING_SOURCE, "taking")
        slots["scheduler"] = "taking:Taking"
    limits = {"max_num_seqs": batch, "kv_memory": 256 << 20, **({"num_threads": 2} if model == SMOLLM2 else {})}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs: list[RequestOutput] = []
    with Engine.from_config(real_config(Path(model), folder, engine=limits, **slots)) as engine:
        for start in range(0, len(prompts), batch):
            outputs += engine.generate(prompts[start : start + batch], params)
    return outputs


def check(
    model: str, folder: Path, prompts: list[Any], max_tokens: int, config: dict[str, Any], expected: list[list[int]]
) -> None:
    """Batches of 1 and 8, with and without a prefix cache, and with seats taken away. config: of the drafter."""
    stands_for = {OWN: model, MOST: 26 if model == SMOLLM2 else 1}
    drafter = {key: stands_for.get(value, value) for key, value in config.items()}
    for batch, kv, taking in ((1, "paged", False), (8, "hash_prefix", False), (8, "hash_prefix", True)):
        outputs = run(model, folder, prompts, max_tokens, batch, taking, drafter=drafter, kv=kv)
        assert [output.error for output in outputs] == [None] * len(prompts)
        assert [output.token_ids for output in outputs] == expected, f"batch {batch}, {kv}"
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        assert sum(one.num_accepted for one in metrics) > 0
        assert (sum(one.num_preemptions for one in metrics) > 0) == taking


def tiny_prompts() -> list[Any]:
    """Ten, which begin in two ways, one of them repetitive."""
    starts = ([5, 6, 7, 8] * 4, [9, 41, 77, 12, 30, 5, 18, 33, 21, 8, 99, 3, 14, 15, 92, 65, 35])
    return [ids(*starts[number % 2], *range(100 + number, 103 + number)) for number in range(10)]


@pytest.fixture(scope="module")
def tiny_expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("plain")
    return [list(output.token_ids) for output in run(str(tiny_model), folder, tiny_prompts(), 40)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_tiny_model(tiny_model: Path, tmp_path: Path, tiny_expected: list[list[int]], name: str) -> None:
    check(str(tiny_model), tmp_path, tiny_prompts(), 40, DRAFTERS[name], tiny_expected)


PLACES = ("the harbour", "an old library", "the night train", "a mountain farm", "the city market")
TASKS = (
    "Repeat this sentence three times: We walked from {} to the river and came back before it was dark.",
    "Write a short story about {}.",
    "List ten things that one can see near {}.",
    "Translate into French: Nobody knew how far it was from {} to the sea, so we asked the driver.",
)


def real_prompts() -> list[Any]:
    return [[{"role": "user", "content": task.format(place)}] for task, place in itertools.product(TASKS, PLACES)]


@pytest.fixture(scope="module")
def real_expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    outputs = run(SMOLLM2, tmp_path_factory.mktemp("plain"), real_prompts(), 128)
    return [list(output.token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_twenty_prompts_of_the_default_model(tmp_path: Path, real_expected: list[list[int]], name: str) -> None:
    check(SMOLLM2, tmp_path, real_prompts(), 128, DRAFTERS[name], real_expected)


@pytest.fixture(scope="module")
def real_traces() -> list[Trace]:
    run = {"model": {"path": SMOLLM2, "dtype": "bfloat16"}, "kv": "paged", "engine": {"max_num_seqs": 20}}
    return collect_traces(run, real_prompts(), SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_blocks"), [("eagle_head", 1), ("mtp_head", 2)])
def test_heads_for_the_default_model(
    tmp_path: Path, real_expected: list[list[int]], real_traces: list[Trace], name: str, num_blocks: int
) -> None:
    """Heads trained on the spot, on these very texts, so that some of their drafts are kept. tests/test_draft_heads.py
    has those of a tiny model."""
    torch.manual_seed(0)
    teacher = load_teacher(SMOLLM2)
    kind = name.removesuffix("_head")
    head = DraftHead(head_config(kind, teacher.spec, num_blocks=num_blocks, intermediate_size=1536))
    distill(head, real_traces, teacher, num_epochs=6, learning_rate=5e-4)
    head.save(tmp_path / "head")
    drafter = {"use": name, "model": str(tmp_path / "head"), "num_tokens": 2}
    check(SMOLLM2, tmp_path, real_prompts(), 128, drafter, real_expected)
