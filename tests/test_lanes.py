"""n outputs of one request: each lane is the draw that its seed and number say, over one copy of the prompt's KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import fake_config, ids, require_idle
from lane_cases import PROMPT, SAMPLED, asking, expected_lane, expected_lanes, logits_after
from step_cases import Steps

from pluglm import Engine, SamplingParams

BLOCK = 4


def make(model: Path, kv: str = "paged", **slots: Any) -> Engine:
    pool = {"use": kv, **({"block_size": BLOCK} if kv != "contiguous" else {})}
    return Engine.from_config(fake_config(model, kv=slots.pop("pool", pool), **slots))


def lanes_of(engine: Engine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    output = engine.generate(ids(*prompt), params)[0]
    if output.error is not None or [one.lane for one in output.completions] != list(range(params.n)):
        raise AssertionError(f"{output.error}, lanes {[one.lane for one in output.completions]}")
    return [one.token_ids for one in output.completions]


@pytest.mark.parametrize("kv", ["paged", "hash_prefix", "radix", "contiguous"])
@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 11])
def test_every_lane_is_what_its_number_and_the_seed_draw(tiny_model: Path, kv: str, length: int) -> None:
    params, prompt = asking(n=4), list(range(1, length + 1))
    with make(tiny_model, kv) as engine:
        found = lanes_of(engine, prompt, params)
        assert found == expected_lanes(engine, prompt, params)
        assert len({tuple(one) for one in found}) > 1
        assert lanes_of(engine, prompt, params) == found
        require_idle(engine)


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 1}, {"max_step_tokens": 1}, {"max_step_tokens": 4}], ids=str)
def test_seats_and_chunks_change_no_lane(tiny_model: Path, limits: dict[str, int]) -> None:
    """Lanes wait for seats like anyone else, the prompt's KV in hand."""
    params = asking(n=5)
    with make(tiny_model, engine=limits) as engine:
        assert lanes_of(engine, PROMPT, params) == expected_lanes(engine, PROMPT, params)
        require_idle(engine)


def test_lane_0_is_the_output_of_a_request_for_one(tiny_model: Path) -> None:
    with make(tiny_model) as engine:
        for params in (SAMPLED, asking(temperature=0.0)):
            one = engine.generate(ids(*PROMPT), params)[0]
            many = engine.generate(ids(*PROMPT), asking(params, n=3))[0]
            assert many.token_ids == one.token_ids == many.completions[0].token_ids
            assert (many.text, many.finish_reason, many.stop) == (one.text, one.finish_reason, one.stop)


def test_without_randomness_all_lanes_are_equal(tiny_model: Path) -> None:
    with make(tiny_model) as engine:
        found = lanes_of(engine, PROMPT, asking(n=3, temperature=0.0))
        assert found == [found[0]] * 3


def test_a_fresh_seed_is_one_for_all_lanes_and_reported(tiny_model: Path) -> None:
    with make(tiny_model) as engine:
        output = engine.generate(ids(*PROMPT), asking(n=3, seed=None))[0]
        again = lanes_of(engine, PROMPT, asking(n=3, seed=output.seed))
        assert again == [one.token_ids for one in output.completions]


def test_lanes_share_the_prompt_in_memory(tiny_model: Path) -> None:
    """Of ten prompt tokens, two whole blocks are shared; each of three lanes has a third block of its own."""
    with make(tiny_model) as engine:
        steps = Steps(engine)
        steps.add("a", list(range(10)), asking(n=3))
        steps.step()
        assert steps.held == 3
        assert len(steps.waiting) == 2
        steps.step()
        assert steps.held == 2 + 3
        assert len({steps.table("a", lane)[:2] for lane in range(3)}) == 1
        steps.finish()
        require_idle(engine)


def test_lanes_without_a_block_of_their_own_to_spare_still_end(tiny_model: Path) -> None:
    """The pool holds one whole lane, so each is preempted for the others and loses its share of the prompt."""
    pool = {"use": "paged", "block_size": BLOCK, "num_blocks": 4}
    params = asking(n=3)
    with make(tiny_model, pool=pool) as engine:
        output = engine.generate(ids(*PROMPT), params)[0]
        assert [one.token_ids for one in output.completions] == expected_lanes(engine, PROMPT, params)
        assert output.metrics is not None
        assert output.metrics.num_preemptions > 0
        assert output.metrics.num_recomputed_tokens > 0
        require_idle(engine)


def test_one_region_serves_lanes_in_turn(tiny_model: Path) -> None:
    params = asking(n=3)
    with make(tiny_model, pool={"use": "contiguous", "num_regions": 1}) as engine:
        assert lanes_of(engine, PROMPT, params) == expected_lanes(engine, PROMPT, params)
        require_idle(engine)


@pytest.mark.parametrize("kv", ["hash_prefix", "radix"])
def test_the_prompt_is_computed_once_and_then_found(tiny_model: Path, kv: str) -> None:
    """The second request adopts the prompt, then forks what it adopted."""
    prompt, params = list(range(9)), asking(n=3)
    with make(tiny_model, kv) as engine:
        steps = Steps(engine)
        for name in ("a", "b"):
            steps.add(name, prompt, params)
            steps.finish()
            found = [steps.tokens(name, lane) for lane in range(3)]
            assert found == expected_lanes(engine, prompt, params)
        assert steps.metrics("a").num_cached_tokens == 0
        assert steps.metrics("b").num_cached_tokens == 8


def test_each_lane_has_its_own_log_probabilities(tiny_model: Path) -> None:
    params = asking(n=3, logprobs=2)
    with make(tiny_model) as engine:
        output = engine.generate(ids(*PROMPT), params)[0]
        for one in output.completions:
            assert [entry.token_id for entry in one.logprobs] == one.token_ids
            for position, entry in enumerate(one.logprobs):
                logprobs_V = torch.log_softmax(logits_after(PROMPT + one.token_ids[:position]), dim=-1)
                assert entry.logprob == pytest.approx(float(logprobs_V[entry.token_id]), abs=1e-6)
                assert list(entry.top) == torch.topk(logprobs_V, 2).indices.tolist()


@pytest.mark.parametrize("kv", ["paged", "radix"])
def test_a_drafter_changes_no_lane(tiny_model: Path, kv: str) -> None:
    """The prompt repeats itself, so that the drafter has something to say."""
    prompt, params = [3, 4, 3, 4, 3, 4, 3], asking(n=3, max_tokens=16)
    with make(tiny_model, kv, drafter={"use": "ngram", "num_tokens": 3}) as engine:
        output = engine.generate(ids(*prompt), params)[0]
        assert [one.token_ids for one in output.completions] == expected_lanes(engine, prompt, params)
        assert output.metrics is not None
        assert output.metrics.num_drafted > 0
        require_idle(engine)


def test_a_grammar_is_followed_by_every_lane_on_its_own(tiny_model: Path) -> None:
    """Each lane spells its own number, which no shared state of the grammar would let it."""
    params = asking(n=4, max_tokens=None, grammar={"regex": "[0-9]{4}"}, ignore_eos=False)
    with make(tiny_model, grammar="llguidance") as engine:
        output = engine.generate(ids(*PROMPT), params)[0]
        texts = [one.text for one in output.completions]
        assert all(len(text) == 4 and text.isdigit() for text in texts)
        assert len(set(texts)) > 1
        assert {one.finish_reason for one in output.completions} == {"stop"}
        require_idle(engine)


def test_metrics_are_of_the_whole_request(tiny_model: Path) -> None:
    with make(tiny_model) as engine:
        metrics: Any = engine.generate(ids(*PROMPT), asking(n=3))[0].metrics
        assert metrics.num_prompt_tokens == len(PROMPT)
        assert metrics.num_output_tokens == 3 * 8
        single: Any = engine.generate(ids(*PROMPT), SAMPLED)[0].metrics
        assert metrics.ttft_s == pytest.approx(single.ttft_s)


def test_streamed_chunks_say_which_lane_they_are_of(tiny_model: Path) -> None:
    params = asking(n=3)
    with make(tiny_model) as engine:
        chunks = list(engine.stream(ids(*PROMPT), params))
        for lane in range(3):
            own = [chunk for chunk in chunks if chunk.lane == lane]
            tokens = [token for chunk in own for token in chunk.token_ids]
            assert tokens == expected_lane(engine, PROMPT, params, lane, 8)
            assert [chunk.lane_finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert [chunk.metrics is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_copies_for_lanes_are_made_in_a_step_that_computes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """A scheduler extends both lanes, so that one must leave the block they share, and then plans nobody's tokens."""
    source = """
        from pluglm.kernel.core import StepPlan
        from pluglm.kernel.interfaces.component import ComponentConfig
        from pluglm.kernel.interfaces.scheduler import Scheduler
        from pluglm.kernel.planner import PolicyScheduler
        from pluglm_schedulers.fcfs import FcfsPolicy

        class Hesitant(Scheduler):
            Config = ComponentConfig
            interface_version = 1

            def __init__(self, config, context):
                self.inner = PolicyScheduler(FcfsPolicy(FcfsPolicy.Config(), context))

            def plan(self, view, budget, kv):
                if view.step % 2 == 0:
                    return self.inner.plan(view, budget, kv)
                for one in (*view.running, *view.waiting):
                    if one.holds_kv:
                        kv.extend(one.sequence_id, one.num_known)
                return StepPlan()
    """
    (tmp_path / "hesitant.py").write_text(_dedent(source))
    config = fake_config(tiny_model, tmp_path, scheduler="hesitant:Hesitant", kv={"use": "paged", "block_size": BLOCK})
    params = asking(n=3)
    with Engine.from_config(config) as engine:
        assert lanes_of(engine, PROMPT, params) == expected_lanes(engine, PROMPT, params)
        require_idle(engine)


def _dedent(source: str) -> str:
    return "\n".join(line.removeprefix(" " * 8) for line in source.splitlines())
