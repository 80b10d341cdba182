"""Public reports about requests that never start, start too early or keep others out, with what is right instead.

Each docstring names the report. There is no server, so nothing here is about health checks or status codes: what a
server would answer is the RequestError or the terminal event.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, require_idle, vocab_size, write_plugin
from step_cases import Steps, takes

from pluglm import Engine, SamplingParams
from pluglm.kernel.errors import RequestError

MANAGERS = ("paged", "hash_prefix", "radix")
SCHEDULERS = ("deadline", "fair", "fcfs", "mlfq", "prefix_first", "priority", "shortest_first", "static_batch")


def make(model: Path, folder: Path | None = None, blocks: int = 10, kv: str = "paged", **slots: Any) -> Engine:
    pool = {"use": kv, "block_size": 4, "num_blocks": blocks}
    return Engine.from_config(fake_config(model, folder, kv=pool, **slots))


def wanting(count: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def require_tokens(steps: Steps, prompts: dict[str, list[int]], count: int) -> None:
    for name, prompt in prompts.items():
        if steps.tokens(name) != fake_tokens(prompt, count, vocab_size(steps.engine)):
            raise AssertionError(f"{name} ended {steps.end(name).finish_reason} with {steps.tokens(name)}")


@pytest.mark.parametrize("kv", MANAGERS)
def test_a_prompt_that_only_the_pool_is_too_small_for_is_refused_and_holds_nobody_up(tiny_model: Path, kv: str) -> None:
    """vllm #39734: such a prompt waited for ever at the head of the queue. The context here holds 512 tokens."""
    with make(tiny_model, kv=kv) as engine:
        steps = Steps(engine)
        steps.add("before", [1, 2], GREEDY)
        with pytest.raises(RequestError, match="the prompt has 41 tokens and the KV pool holds 40 tokens"):
            steps.add("huge", [7] * 41, wanting(1))
        steps.add("behind", [3, 4], GREEDY)
        steps.finish()
        require_tokens(steps, {"before": [1, 2], "behind": [3, 4]}, 8)


@pytest.mark.parametrize("kv", MANAGERS)
def test_a_request_that_reaches_the_wall_ends_there_and_never_preempts_itself(tiny_model: Path, kv: str) -> None:
    """vllm PR #52530: 1000 + 24 tokens on a pool for 1008 preempted itself for ever at its ninth output token."""
    prompt = [7] * 100
    with make(tiny_model, blocks=27, kv=kv) as engine:
        strict = engine.generate(ids(*prompt), wanting(24))[0]
        assert strict.finish_reason == "refused"
        assert strict.error is not None
        assert "prompt 100 + max_tokens 24 = 124, the KV pool holds 108 tokens" in strict.error
        for params in (wanting(None), wanting(24).model_copy(update={"clip_max_tokens": True})):
            output = engine.generate(ids(*prompt), params)[0]
            assert (output.finish_reason, len(output.token_ids)) == ("length", 8)
            assert output.metrics is not None
            assert output.metrics.num_preemptions == 0
        require_idle(engine)


@pytest.mark.parametrize("kv", MANAGERS)
def test_two_long_prompts_never_wait_for_each_other_s_blocks(tiny_model: Path, kv: str) -> None:
    """vllm #45388, vllm #45387: two prompts had each reserved a part, and neither could go on."""
    prompts = {"a": [1] * 24, "b": [2] * 24}  # six blocks each, of ten
    with make(tiny_model, kv=kv, engine={"max_step_tokens": 4}) as engine:
        steps = Steps(engine)
        for name, prompt in prompts.items():
            steps.add(name, prompt, GREEDY)
        for _ in range(6):
            steps.step()
            assert steps.running == ["a"]
            assert len(steps.table("a")) >= 6
        steps.finish()
        require_tokens(steps, prompts, 8)
        assert [steps.metrics(name).num_preemptions for name in prompts] == [0, 0]
        require_idle(engine)


def test_two_that_come_back_from_the_host_never_wait_for_each_other_s_blocks(tiny_model: Path, tmp_path: Path) -> None:
    """The same reports; the KV that is loaded in part there is KV in host memory here."""
    prompts = {"a": [1] * 15, "b": [2] * 15, "u": [3] * 30}
    with make(tiny_model, tmp_path, scheduler=takes(tmp_path, "offload")) as engine:
        steps = Steps(engine)
        for name in ("a", "b"):
            steps.add(name, prompts[name], wanting(4))
        steps.step(2)
        steps.add("u", prompts["u"], wanting(4), priority=-1)
        steps.step()
        assert steps.running == ["u"]
        assert all(steps.sequence(name).offloaded is not None for name in ("a", "b"))
        steps.finish()
        require_tokens(steps, prompts, 4)
        assert [steps.metrics(name).num_recomputed_tokens for name in prompts] == [0, 0, 0]
        require_idle(engine)


def test_a_run_that_stands_still_is_ended_with_a_reason(tiny_model: Path, tmp_path: Path) -> None:
    """vllm #45414: the same stall, with all health checks green. Here a policy gives nobody any tokens."""
    source = """
        from pluglm_schedulers.fcfs import FcfsPolicy

        class Miser(FcfsPolicy):
            def share(self, view, request, tokens_left):
                return 0
    """
    write_plugin(tmp_path, source, "miser")
    with make(tiny_model, tmp_path, scheduler="miser:Miser") as engine:
        steps = Steps(engine)
        steps.add("a", [1, 2], GREEDY)
        steps.until(lambda: bool(steps.ends("a")), limit=101)
        assert steps.end("a").finish_reason == "error"
        assert steps.end("a").error == "scheduler 'miser:Miser' planned nothing in 100 steps with work waiting"
        require_idle(engine)


@pytest.mark.parametrize("kv", MANAGERS)
def test_a_prompt_starts_only_when_all_of_it_fits(tiny_model: Path, kv: str) -> None:
    """vllm #25538, vllm PR #21793: a chunk was let in, the rest found no room, and it was preempted again and again."""
    prompts = {"runs": [1] * 14, "long": [2] * 28}  # four and seven blocks of ten
    with make(tiny_model, kv=kv, engine={"max_step_tokens": 8}) as engine:
        steps = Steps(engine)
        steps.add("runs", prompts["runs"], wanting(3))
        steps.step(2)
        steps.add("long", prompts["long"], wanting(3))
        steps.step()
        assert steps.running == ["runs"]
        steps.until(lambda: steps.running == ["long"])
        assert len(steps.table("long")) == 7
        steps.finish()
        require_tokens(steps, prompts, 3)
        assert steps.metrics("long").num_preemptions == 0
        assert steps.metrics("long").num_recomputed_tokens == 0


def test_only_strictly_less_urgent_requests_lose_their_seat(tiny_model: Path) -> None:
    """vllm #40004: with all seats taken, urgent requests waited behind others."""
    with make(tiny_model, scheduler="priority", engine={"max_num_seqs": 1}) as engine:
        steps = Steps(engine)
        steps.add("low", [1, 2], GREEDY, priority=5)
        steps.step(2)
        steps.add("equal", [3, 4], GREEDY, priority=5)
        steps.step()
        assert steps.running == ["low"]
        steps.add("urgent", [5, 6], GREEDY, priority=0)
        steps.step()
        assert steps.running == ["urgent"]
        steps.finish()
        require_tokens(steps, {"low": [1, 2], "equal": [3, 4], "urgent": [5, 6]}, 8)
        preempted = [steps.metrics(name).num_preemptions for name in ("low", "equal", "urgent")]
        assert preempted == [1, 0, 0]


def test_a_long_prompt_shares_its_steps_and_wastes_none_when_alone(tiny_model: Path) -> None:
    """sglang PR #34623, sglang #8764, vllm #10774, vllm #57413: everyone waited until a long prompt was through."""
    long, shorts = [1] * 160, {f"s{i}": [2 + i] * 6 for i in range(3)}
    with make(tiny_model, blocks=100, engine={"max_step_tokens": 16}) as engine:
        steps = Steps(engine)
        steps.add("long", long, GREEDY)
        steps.step()
        assert steps.sequence("long").num_computed == 16  # all of the step: nobody else wants any
        for name, prompt in shorts.items():
            steps.add(name, prompt, GREEDY)
        steps.until(lambda: all(steps.tokens(name) for name in shorts), limit=6)
        assert steps.tokens("long") == []
        steps.finish()
        require_tokens(steps, {"long": long, **shorts}, 8)


@pytest.mark.parametrize(("options", "passes"), [({}, False), ({"skip_blocked": 2, "max_skips": 3}, True)])
def test_whether_small_requests_pass_a_large_one_is_the_policy_s_choice(
    tiny_model: Path, options: dict[str, int], passes: bool
) -> None:
    """vllm #31731: the first failed allocation ended the admission of everyone behind it. The passing has a bound."""
    with make(tiny_model, scheduler={"use": "fcfs", **options}) as engine:
        steps = Steps(engine)
        steps.add("runs", [1] * 20, wanting(12))
        steps.step()
        steps.add("large", [2] * 24, wanting(2))
        passed = []
        for number in range(6):
            steps.add(f"s{number}", [3], wanting(1))
            steps.step()
            passed.append(bool(steps.ends(f"s{number}")))
        assert passed == [passes] * 3 + [False] * 3
        steps.finish()
        require_tokens(steps, {"runs": [1] * 20}, 12)
        require_tokens(steps, {"large": [2] * 24}, 2)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("kv", ["paged", "radix"])
def test_who_waits_for_its_first_turn_holds_nothing(tiny_model: Path, kv: str, scheduler: str) -> None:
    """vllm PR #31857: waiting requests held an encoder cache that the running ones needed. Here the resource is KV."""
    with make(tiny_model, kv=kv, scheduler=scheduler, engine={"max_num_seqs": 2, "max_step_tokens": 6}) as engine:
        steps = Steps(engine)
        prompts = {f"r{number}": [number] * (1 + 5 * number % 17) for number in range(8)}
        for name, prompt in prompts.items():
            steps.add(name, prompt, wanting(4))
        for _ in range(300):
            if not steps.core.roster.requests:
                break
            steps.step()
            for one in steps.core.roster.waiting.values():
                if not one.num_preemptions:
                    with pytest.raises(KeyError):
                        steps.core.kv.block_table(one.sequence_id)
        steps.finish()
        require_tokens(steps, prompts, 4)
        require_idle(engine)
