"""Public reports about preemption and running out of KV, with what is right instead. Docstrings name the reports."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from differential_cases import FORCED, FORCED_SOURCE
from engine_cases import GREEDY, fake_config, fake_tokens, ids, require_idle, vocab_size, write_plugin
from step_cases import Steps

from pluglm import Engine, SamplingParams
from pluglm.kernel.errors import KVExhausted

MANAGERS = ("paged", "hash_prefix", "radix", "contiguous")


def pool(kv: str, blocks: int) -> dict[str, Any]:
    """Of 4-token blocks; regions of the contiguous manager hold 32 tokens."""
    if kv == "contiguous":
        return {"use": kv, "num_regions": max(1, blocks // 8), "region_tokens": 32}
    return {"use": kv, "block_size": 4, "num_blocks": blocks}


def make(model: Path, folder: Path | None = None, blocks: int = 10, kv: str = "paged", **slots: Any) -> Engine:
    return Engine.from_config(fake_config(model, folder, kv=pool(kv, blocks), **slots))


def wanting(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def require_tokens(steps: Steps, prompts: dict[str, list[int]], count: int) -> None:
    for name, prompt in prompts.items():
        if steps.tokens(name) != fake_tokens(prompt, count, vocab_size(steps.engine)):
            raise AssertionError(f"{name} ended {steps.end(name).finish_reason} with {steps.tokens(name)}")


def test_who_falls_is_asked_apart_from_who_goes_first(tiny_model: Path, tmp_path: Path) -> None:
    """vllm #54644, vllm #41951: the victim was always the last in order, however much work that threw away.

    This policy keeps arrival order and lets the one fall that has computed least. Its recomputed tokens are reported,
    and it gets its place back before those that arrived after it.
    """
    source = """
        from pluglm.kernel.interfaces.scheduler import Stop, Victims
        from pluglm_schedulers.fcfs import FcfsPolicy

        class Cheapest(FcfsPolicy):
            def on_blocked(self, view, request, need):
                others = [one for one in view.running if one.sequence_id != request.sequence_id]
                if need == "seat" or not others or request not in view.running:
                    return Stop()
                return Victims(tuple(one.sequence_id for one in sorted(others, key=lambda one: one.num_computed)))
    """
    write_plugin(tmp_path, source, "cheapest")
    prompts = {"a": [1] * 12, "b": [2] * 3, "c": [3] * 12}
    limits = {"max_num_seqs": 3}
    with make(tiny_model, tmp_path, 8, scheduler="cheapest:Cheapest", engine=limits) as engine:
        steps = Steps(engine)
        for name, prompt in prompts.items():
            steps.add(name, prompt, wanting(4))
        steps.step()
        assert steps.running == ["a", "b", "c"]
        steps.add("late", [4] * 3, wanting(4))
        steps.step()
        assert (steps.running, steps.waiting) == (["a", "c"], ["late", "b"])
        steps.until(lambda: "b" in steps.running)
        steps.finish()
        require_tokens(steps, {**prompts, "late": [4] * 3}, 4)
        assert steps.metrics("b").num_preemptions == 1
        assert steps.metrics("b").num_recomputed_tokens == len(prompts["b"])
        assert steps.metrics("b").finished_s <= steps.metrics("late").finished_s
        assert steps.metrics("a").num_preemptions == steps.metrics("c").num_preemptions == 0


@pytest.mark.parametrize("kv", ["paged", "hash_prefix", "radix"])
def test_one_that_is_served_and_falls_in_the_same_step_does_no_harm(tiny_model: Path, tmp_path: Path, kv: str) -> None:
    """vllm #23347: an assertion ended the engine. Serving the last arrival first makes it happen at every block."""
    source = """
        from pluglm.kernel.interfaces.scheduler import Stop, Victims
        from pluglm_schedulers.fcfs import FcfsPolicy

        class Backwards(FcfsPolicy):
            def order_running(self, view):
                super().order_running(view)
                return [one.sequence_id for one in sorted(view.running, key=lambda one: -one.arrival_s)]

            def on_blocked(self, view, request, need):
                later = [one.sequence_id for one in view.running if one.arrival_s > request.arrival_s]
                return Victims(tuple(later)) if later and need == "kv" else Stop()
    """
    write_plugin(tmp_path, source, "backwards")
    prompts = {f"r{number}": [number] * 4 for number in range(4)}
    with make(tiny_model, tmp_path, 8, kv, scheduler="backwards:Backwards") as engine:
        steps = Steps(engine)
        for name, prompt in prompts.items():
            steps.add(name, prompt, wanting(12))
            steps.step()
        steps.finish()
        require_tokens(steps, prompts, 12)
        assert steps.metrics("r0").num_preemptions == 0
        assert steps.metrics("r3").num_preemptions > 0
        require_idle(engine)


@pytest.mark.parametrize("kv", ["hash_prefix", "radix"])
@pytest.mark.parametrize("when", ["preempt", "shrink"])
def test_nobody_falls_once_enough_is_on_its_way_back(tiny_model: Path, kv: str, when: str) -> None:
    """vllm-ascend #16315, vllm PR #49675: frees that came later looked like none, and every running request fell.

    Here what a victim gives back is not free but cached, which can be had at once. One block is missing.
    """
    with make(tiny_model, blocks=6, kv=kv, engine={"when_kv_full": when}) as engine:
        steps = Steps(engine)
        prompts = {"a": [1] * 8, "b": [2] * 6, "c": [3] * 8}
        for name, prompt in prompts.items():
            steps.add(name, prompt, wanting(4))
        steps.step()
        assert steps.core.kv.capacity().free_blocks == 0
        steps.step()
        assert (steps.running, steps.waiting) == (["a", "b"], ["c"])
        steps.finish()
        require_tokens(steps, prompts, 4)


def test_whoever_needs_what_an_abandoned_call_holds_waits_for_it(tiny_model: Path, tmp_path: Path) -> None:
    """The same reports: memory that is fenced is neither free nor lost. Nobody is ended while it may come back."""
    source = """
        import threading
        from pluglm.backends.fake import FakeBackend

        class Slow(FakeBackend):
            go_on = threading.Event()

            def execute(self, model, inputs, attention, kv):
                if int(inputs.token_ids_T[0]) == 13:
                    self.go_on.wait(20)
                return super().execute(model, inputs, attention, kv)
    """
    write_plugin(tmp_path, source, "slow")
    with make(tiny_model, tmp_path, 4, backend="slow:Slow", engine={"plugin_timeout_s": 2.0}) as engine:
        steps = Steps(engine)
        steps.add("bad", [13] * 12, GREEDY.model_copy(update={"max_tokens": 2}))
        steps.step()
        end = steps.end("bad")
        assert end.error is not None
        assert "gave no answer within 2 s and was abandoned" in end.error
        assert steps.held == 3
        steps.add("next", [1] * 8, GREEDY)
        steps.step(3)
        assert steps.waiting == ["next"]
        go_on: threading.Event = engine.run.slots["backend"].cls.go_on
        go_on.set()
        steps.finish()
        require_tokens(steps, {"next": [1] * 8}, 8)
        assert steps.metrics("next").num_preemptions == 0
        require_idle(engine)


@pytest.mark.parametrize("kv", MANAGERS)
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_output_is_complete_however_often_its_request_falls(
    tiny_model: Path, tmp_path: Path, kv: str, chunk: int
) -> None:
    """vllm #16832: tokens were missing after a preemption. Here somebody falls in every step, in every mode."""
    write_plugin(tmp_path, FORCED_SOURCE, FORCED)
    scheduler = f"{FORCED}:ForcedPreemption"
    with make(tiny_model, tmp_path, 24, kv, scheduler=scheduler, engine={"max_step_tokens": chunk}) as engine:
        prompts = [[number] * (1 + 3 * number) for number in range(5)]
        outputs = engine.generate([ids(*prompt) for prompt in prompts], GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = fake_tokens(prompt, 8, vocab_size(engine))
            assert output.token_ids == tokens
            assert output.text == engine.tokenizer.decode(tokens)
            assert output.metrics is not None
            assert output.metrics.num_output_tokens == 8
        planner: Any = engine._core.parts.scheduler
        assert min(planner.counts.values()) > 0
        require_idle(engine)


def test_steps_without_any_work_are_legal(tiny_model: Path, tmp_path: Path) -> None:
    """nano-vllm #274: an empty decode batch hit an assertion. Two of three steps here plan nothing."""
    source = """
        from pluglm.kernel.core import StepPlan
        from pluglm.kernel.interfaces.component import ComponentConfig
        from pluglm.kernel.interfaces.scheduler import Scheduler
        from pluglm.kernel.planner import PolicyScheduler
        from pluglm_schedulers.fcfs import FcfsPolicy

        class Lazy(Scheduler):
            Config = ComponentConfig
            interface_version = 1

            def __init__(self, config, context):
                self.inner = PolicyScheduler(FcfsPolicy(FcfsPolicy.Config(), context))

            def plan(self, view, budget, kv):
                return StepPlan() if view.step % 3 else self.inner.plan(view, budget, kv)
    """
    write_plugin(tmp_path, source, "lazy")
    with make(tiny_model, tmp_path, scheduler="lazy:Lazy") as engine:
        engine.step()  # nothing is there at all
        output = engine.generate(ids(1, 2), GREEDY)[0]
        assert output.token_ids == fake_tokens([1, 2], 8, vocab_size(engine))
        require_idle(engine)


@pytest.mark.parametrize("kv", ["hash_prefix", "radix"])
def test_a_hit_that_changes_between_question_and_use_is_what_it_is_when_used(tiny_model: Path, kv: str) -> None:
    """nano-vllm PR #211, nano-vllm #233: more was cached by the time of allocation, and an index ran over.

    The policy asks for every prefix first; then admissions of the same step evict some of what it was told of, and
    running requests publish more.
    """
    with make(tiny_model, blocks=12, kv=kv, scheduler="prefix_first", engine={"max_num_seqs": 3}) as engine:
        steps = Steps(engine)
        prompts = {}
        for number in range(12):
            prompts[f"r{number}"] = [[1, 2, 3][number % 3]] * (9 + number % 4) + [number]
        for turn in range(3):
            for name, prompt in prompts.items():
                steps.add(f"{name}-{turn}", prompt, wanting(3))
            steps.finish()
            for name, prompt in prompts.items():
                assert steps.tokens(f"{name}-{turn}") == fake_tokens(prompt, 3, vocab_size(engine))
        assert sum(steps.metrics(f"{name}-2").num_cached_tokens for name in prompts) > 0
        require_idle(engine)


@pytest.mark.parametrize("kv", MANAGERS)
def test_exhaustion_is_an_answer_that_changes_nothing(tiny_model: Path, kv: str) -> None:
    """sglang #26265, sglang PR #19881, sglang #30743, sglang #34676: a failed allocation took the server down."""
    with make(tiny_model, blocks=8, kv=kv) as engine:
        manager: Any = engine._core.kv
        before = manager.capacity()
        transaction = manager.transaction()
        transaction.acquire(1)
        transaction.extend(1, 5)
        free = transaction.free_blocks()
        with pytest.raises(KVExhausted):
            transaction.extend(1, 33)
        assert transaction.free_blocks() == free
        transaction.extend(1, 6)
        transaction.rollback()
        assert manager.capacity() == before
        manager.audit()


@pytest.mark.parametrize("kv", MANAGERS)
def test_a_pool_for_two_serves_thirty_at_once(tiny_model: Path, kv: str) -> None:
    """The same reports: requests wait, fall and come back; none fails and the engine goes on."""
    with make(tiny_model, blocks=16, kv=kv, engine={"max_num_seqs": 32}) as engine:
        prompts = [[number] * (3 + number % 9) for number in range(30)]
        outputs = engine.generate([ids(*prompt) for prompt in prompts], wanting(20))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == fake_tokens(prompt, 20, vocab_size(engine))
        assert max(output.metrics.num_preemptions for output in outputs if output.metrics) <= 10
        require_idle(engine)
