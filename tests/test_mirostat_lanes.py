"""What mirostat keeps of a lane: it survives batches, lanes, drafts and preemption, and goes with the lane.

The reference asks the sampler for one token after another, on the fake backend's documented logits; that the sampler
itself is right is test_mirostat.py's.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, ids, require_idle
from lane_cases import PROMPT, logits_after
from step_cases import Steps, takes

from pluglm import Engine, SamplingParams
from pluglm.kernel.core import SampleRow

PARAMS = [
    SamplingParams(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.5, seed=seed, max_tokens=20, ignore_eos=True)
    for version in (1, 2)
    for seed in (4, 9)
]


def expected(engine: Engine, prompt: list[int], params: SamplingParams, lane: int = 0) -> list[int]:
    sampler: Any = engine.core.parts.sampler
    row = SampleRow(
        params=params, prompt_token_ids=tuple(prompt), output_token_ids=[], seed=params.seed or 0, lane=lane,
        position=0, memory={},
    )  # fmt: skip
    output: list[int] = []
    for position in range(params.max_tokens or 0):
        one = replace(row, output_token_ids=list(output), position=position)
        output += sampler.sample(logits_after(prompt + output)[None], [one])
    return output


def test_lanes_of_a_batch_have_a_state_each(tiny_model: Path) -> None:
    with Engine.from_config(fake_config(tiny_model)) as engine:
        several = [one.model_copy(update={"n": 3}) for one in PARAMS]
        outputs = engine.generate([ids(*PROMPT)] * 4, several)
        num_changed = 0
        for output, params in zip(outputs, PARAMS, strict=True):
            lanes = [expected(engine, PROMPT, params, lane) for lane in range(3)]
            assert [one.token_ids for one in output.completions] == lanes
            assert len({tuple(lane) for lane in lanes}) == 3
            plain = engine.generate(ids(*PROMPT), params.model_copy(update={"mirostat": 0}))[0]
            num_changed += plain.token_ids != lanes[0]
        assert num_changed >= 2
        require_idle(engine)


DRAFTS = '''
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import Proposal


class DraftsConfig(ComponentConfig):
    texts: list[list[int]]


class Drafts:
    """Up to five tokens of the text that goes on as the request does, of which every third place is wrong."""

    Config = DraftsConfig
    interface_version = 2

    def __init__(self, config, context):
        self.texts = config.texts

    def propose(self, requests):
        return [Proposal(self.one(request.token_ids, request.max_tokens)) for request in requests]

    def one(self, known, most):
        for text in self.texts:
            if text[: len(known)] == list(known):
                places = range(len(known), min(len(text), len(known) + min(most, 5)))
                return [(text[place] + (place % 3 == 0)) % 300 for place in places]
        return []

    def observe(self, sequence_id, num_accepted, token_ids):
        pass

    def release(self, sequence_id):
        pass
'''


def test_refused_and_accepted_drafts_leave_the_state_of_the_text(tiny_model: Path, tmp_path: Path) -> None:
    with Engine.from_config(fake_config(tiny_model)) as engine:
        texts = [expected(engine, PROMPT, params) for params in PARAMS]
    (tmp_path / "drafts.py").write_text(DRAFTS)
    drafter = {"use": "drafts:Drafts", "texts": [PROMPT + text for text in texts]}
    with Engine.from_config(fake_config(tiny_model, tmp_path, drafter=drafter)) as engine:
        outputs = engine.generate([ids(*PROMPT)] * 4, PARAMS)
        assert [output.token_ids for output in outputs] == texts
        for output in outputs:
            assert output.metrics is not None
            assert 5 < output.metrics.num_accepted < output.metrics.num_drafted


@pytest.mark.parametrize("mode", ["recompute", "offload", "pause"])
@pytest.mark.parametrize("params", PARAMS[1:3])
def test_a_preempted_lane_goes_on_as_it_was(
    tiny_model: Path, tmp_path: Path, mode: str, params: SamplingParams
) -> None:
    limits = {"max_num_seqs": 1, "offload_memory": 2**20}
    config = fake_config(tiny_model, tmp_path, scheduler=takes(tmp_path, mode), engine=limits)
    with Engine.from_config(config) as engine:
        steps = Steps(engine)
        steps.add("a", PROMPT, params)
        for urgent in range(3):
            steps.step(5)
            steps.add(f"b{urgent}", [7, 8], PARAMS[0].model_copy(update={"max_tokens": 3}), priority=-1)
        steps.finish()
        assert steps.metrics("a").num_preemptions == 3
        assert steps.tokens("a") == expected(engine, PROMPT, params)


def test_nothing_is_left_of_a_request_that_ended(tiny_model: Path) -> None:
    with Engine.from_config(fake_config(tiny_model)) as engine:
        steps = Steps(engine)
        steps.add("a", PROMPT, PARAMS[0])
        steps.step(6)
        kept = [
            weakref.ref(seen.ids_C)
            for memory in steps.sequence("a").sampler_memory.values()
            for seen in memory.values()
        ]
        assert 1 <= len(kept) <= 2  # of one position or two, and not of all five
        steps.finish()
        gc.collect()
        assert [one() for one in kept] == [None] * len(kept)
