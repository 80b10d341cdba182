"""prompt_logprobs and echo: raw log-probabilities of the prompt, whatever chunks, caches and preemption do to it.

The authorities: LlamaForCausalLM of transformers in float32, and the fake backend's documented logits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import fake_config, ids, real_config, require_idle, write_plugin
from lane_cases import PROMPT, logits_after
from step_cases import takes

from pluglm import Engine, PluglmError, SamplingParams
from pluglm.kernel.core import TokenLogprobs
from pluglm.outputs import logprobs_json

LONG = [(7 * place * place + 3 * place) % 300 for place in range(41)]
TWO = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine.from_config(fake_config(tiny_model)) as engine:
        yield engine


def expected(prompt: list[int], num_top: int) -> list[tuple[Any, ...] | None]:
    """By the documented logits, in float64."""
    found: list[tuple[Any, ...] | None] = [None]
    for place in range(1, len(prompt)):
        logprobs_V = logits_after(prompt[:place]).double().log_softmax(0)
        own = logprobs_V[prompt[place]]
        top = torch.topk(logprobs_V, num_top).indices.tolist()
        found.append((prompt[place], pytest.approx(float(own), abs=1e-5), int((logprobs_V > own).sum()) + 1, top))
    return found


def shown(entries: Any) -> list[tuple[Any, ...] | None]:
    return [one and (one.token_id, one.logprob, one.rank, list(one.top)) for one in entries]


def test_every_token_but_the_first_has_one(engine: Engine) -> None:
    params = [TWO, TWO.model_copy(update={"prompt_logprobs": 0, "temperature": 0.7}), SamplingParams(max_tokens=2)]
    outputs = engine.generate([ids(*LONG), ids(*PROMPT), ids(*PROMPT)], params)
    assert shown(outputs[0].prompt_logprobs) == expected(LONG, 2)
    assert shown(outputs[1].prompt_logprobs) == expected(PROMPT, 0)
    assert outputs[2].prompt_logprobs == []
    assert shown(engine.generate(ids(5), TWO)[0].prompt_logprobs) == [None]
    require_idle(engine)
    assert engine._extras.runner._prompts == engine._extras._wishes == {}


def test_they_are_raw(engine: Engine) -> None:
    """vllm #9453, TRL #4163, vllm #47680: the prompt's side had another mode than the output's."""
    changed = {"temperature": 0.3, "top_k": 3, "repetition_penalty": 2.0, "logit_bias": {LONG[2]: 50.0}, "n": 2}
    params = SamplingParams.model_validate({**TWO.model_dump(), **changed, "allowed_token_ids": (3, 4, 5)})
    assert shown(engine.generate(ids(*LONG), params)[0].prompt_logprobs) == expected(LONG, 2)


def test_nothing_else_changes(engine: Engine) -> None:
    plain = TWO.model_copy(update={"prompt_logprobs": None, "logprobs": 2})
    one, other = engine.generate([ids(*LONG)] * 2, [plain, plain.model_copy(update={"prompt_logprobs": 5})])
    assert (one.token_ids, one.text, one.logprobs) == (other.token_ids, other.text, other.logprobs)


@pytest.mark.parametrize("budget", [1, 2, 7, 40, 41])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_chunks_are_stitched(tiny_model: Path, budget: int, drafter: Any) -> None:
    """vllm #53488: with speculation, the buffer of prompt logprobs was overwritten."""
    config = fake_config(tiny_model, engine={"max_step_tokens": budget}, drafter=drafter)
    with Engine.from_config(config) as engine:
        repeated = (PROMPT * 8)[:40]
        outputs = engine.generate([ids(*LONG), ids(*repeated), ids(*PROMPT)], TWO)
        for output, prompt in zip(outputs, (LONG, repeated, PROMPT), strict=True):
            assert shown(output.prompt_logprobs) == expected(prompt, 2)


LATE = """
from pluglm.backends.fake import FakeBackend


class Late(FakeBackend):
    def launch(self, model, inputs, attention, kv):
        return lambda: self.execute(model, inputs, attention, kv)
"""


def test_steps_that_are_planned_ahead(tiny_model: Path, tmp_path: Path) -> None:
    limits = {"max_step_tokens": 7, "plan_ahead": True}
    config = fake_config(tiny_model, tmp_path, backend=f"{write_plugin(tmp_path, LATE, 'late')}:Late", engine=limits)
    with Engine.from_config(config) as engine:
        for output, prompt in zip(engine.generate([ids(*LONG), ids(*PROMPT)], TWO), (LONG, PROMPT), strict=True):
            assert shown(output.prompt_logprobs) == expected(prompt, 2)


@pytest.mark.parametrize("kv", ["hash_prefix", "radix"])
def test_a_cached_prefix_is_computed_again(tiny_model: Path, kv: str) -> None:
    """vllm #8268, vllm #42245: with prefix caching, an assertion or stale values. The hit is skipped for them alone."""
    pool = {"use": kv, "block_size": 4, "num_blocks": 200}
    with Engine.from_config(fake_config(tiny_model, kv=pool)) as engine:
        plain = TWO.model_copy(update={"prompt_logprobs": None})
        engine.generate(ids(*LONG), plain)
        for _ in range(3):
            scored, reused = engine.generate([ids(*LONG)] * 2, [TWO, plain])
            assert shown(scored.prompt_logprobs) == expected(LONG, 2)
            assert scored.metrics is not None
            assert reused.metrics is not None
            assert (scored.metrics.num_cached_tokens, reused.metrics.num_cached_tokens) == (0, 40)
            assert scored.token_ids == reused.token_ids


@pytest.mark.parametrize("kv", ["paged", "hash_prefix"])
@pytest.mark.parametrize("mode", ["recompute", "offload", "pause"])
def test_preemption_in_the_middle_of_a_prompt(tiny_model: Path, tmp_path: Path, mode: str, kv: str) -> None:
    limits = {"max_num_seqs": 1, "max_step_tokens": 6, "offload_memory": 2**20}
    pool = {"use": kv, "block_size": 4, "num_blocks": 200}
    config = fake_config(tiny_model, tmp_path, scheduler=takes(tmp_path, mode), engine=limits, kv=pool)
    with Engine.from_config(config) as engine:
        request_id = engine._submit(ids(*LONG), TWO, "a", _options()).request_id
        urgent = TWO.model_copy(update={"prompt_logprobs": None, "max_tokens": 1})
        for number in range(3):
            engine.step()
            engine.step()
            engine.submit(ids(7, 8), urgent, request_id=f"b{number}", priority=-1)
        chunks = list(engine._chunks(request_id))[1:]
        assert shown(chunks[0].prompt_logprobs) == expected(LONG, 2)  # type: ignore[union-attr]
        metrics = chunks[-1].metrics  # type: ignore[union-attr]
        assert metrics is not None
        assert metrics.num_preemptions >= 2


def _options() -> Any:
    from pluglm.arguments import Options

    return Options()


def test_they_are_those_of_transformers(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        rows_SV = model(torch.tensor([LONG])).logits[0].double().log_softmax(-1)
    with Engine.from_config(real_config(tiny_model, engine={"max_step_tokens": 9})) as engine:
        found = engine.generate(ids(*LONG), TWO)[0].prompt_logprobs
    assert found[0] is None
    for place, one in enumerate(found[1:], start=1):
        row_V = rows_SV[place - 1]
        assert one is not None
        assert one.logprob == pytest.approx(float(row_V[LONG[place]]), abs=2e-4)
        assert list(one.top) == torch.topk(row_V, 2).indices.tolist()


def test_a_stream_has_them_on_its_first_chunk(engine: Engine) -> None:
    chunks = list(engine.stream(ids(*LONG), TWO))
    assert shown(chunks[0].prompt_logprobs) == expected(LONG, 2)
    assert [chunk.prompt_logprobs for chunk in chunks[1:]] == [()] * (len(chunks) - 1)
    with pytest.raises(PluglmError, match="prompt_logprobs are not in events; use generate or stream"):
        engine.submit(ids(*LONG), TWO)


def test_a_request_that_ends_early_has_those_so_far(tiny_model: Path) -> None:
    with Engine.from_config(fake_config(tiny_model, engine={"max_step_tokens": 10})) as engine:
        chunks = engine.stream(ids(*LONG), TWO, request_id="a")
        engine.step()
        engine.step()
        engine.cancel("a")
        (last,) = chunks
        assert last.finish_reason == "cancelled"
        assert shown(last.prompt_logprobs) == expected(LONG, 2)[:21]


def test_echo_puts_the_prompt_before_every_output(engine: Engine) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=5, n=3, seed=1, ignore_eos=True)
    echo = params.model_copy(update={"echo": True})
    for prompt, text in (("the cat", "the cat"), (ids(*PROMPT), engine.tokenizer.decode(PROMPT))):
        plain, echoed = engine.generate([prompt, prompt], [params, echo])
        assert [one.text for one in echoed.completions] == [text + one.text for one in plain.completions]
        assert [one.token_ids for one in echoed.completions] == [one.token_ids for one in plain.completions]
        streamed = ["", "", ""]
        for chunk in engine.stream(prompt, echo):
            streamed[chunk.lane] += chunk.text
        assert streamed == [one.text for one in echoed.completions]
    best = engine.generate("the cat", echo.model_copy(update={"n": 1, "best_of": 4}))[0]
    assert best.text.startswith("the cat")
    require_idle(engine)


def test_json_has_no_infinity() -> None:
    """sglang #4097, vllm #10234, sonar #183: `-inf` broke the JSON encoder."""
    entries = [None, TokenLogprobs(3, -math.inf, 9, {1: -0.5, 2: math.nan, 3: -math.inf})]
    text = json.dumps(logprobs_json(entries), allow_nan=False)
    assert json.loads(text) == [
        None,
        {"token_id": 3, "logprob": None, "rank": 9, "top": {"1": -0.5, "2": None, "3": None}},
    ]
