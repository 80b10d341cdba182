"""Limits at the door: what can never run is refused with its numbers, and what just fits runs to its last token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, require_idle, vocab_size

from pluglm import Engine, RequestOutput, RunConfig, SamplingParams
from pluglm.kernel.errors import RequestError

CONTEXT = 32


def make(model: Path, **slots: Any) -> Engine:
    limits = {"path": str(model), "dtype": "float32", "max_model_len": CONTEXT}
    return Engine.from_config(fake_config(model, model=limits, **slots))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with make(tiny_model) as engine:
        yield engine


def wanting(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def refused(engine: Engine, prompt: Any, params: SamplingParams = GREEDY) -> str:
    output: RequestOutput = engine.generate(prompt, params)[0]
    assert output.finish_reason == "refused"
    assert output.error is not None
    assert "\n" not in output.error
    assert output.token_ids == []
    assert output.metrics is None
    require_idle(engine)
    return output.error


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 5000])
@pytest.mark.parametrize("max_tokens", [1, None])
def test_prompt_too_long(engine: Engine, length: int, max_tokens: int | None) -> None:
    error = refused(engine, ids(*[1] * length), wanting(max_tokens))
    assert f"the prompt has {length} tokens and the context holds {CONTEXT} tokens" in error


def test_prompt_and_max_tokens_beyond_the_context(engine: Engine) -> None:
    error = refused(engine, ids(*[1] * 30), wanting(3))
    assert "prompt 30 + max_tokens 3 = 33, the context holds 32 tokens" in error
    assert "at most 2" in error


@pytest.mark.parametrize(
    "kv", [{"use": "paged", "block_size": 5, "num_blocks": 3}, {"use": "contiguous", "region_tokens": 15}]
)
def test_prompt_and_max_tokens_beyond_the_pool(tiny_model: Path, kv: Any) -> None:
    with make(tiny_model, kv=kv) as engine:
        assert "prompt 10 + max_tokens 6 = 16, the KV pool holds 15 tokens" in refused(
            engine, ids(*range(10)), wanting(6)
        )
        assert "the prompt has 15 tokens and the KV pool holds 15" in refused(engine, ids(*range(15)), wanting(1))
        for count in (5, None):
            output = engine.generate(ids(*range(10)), wanting(count))[0]
            assert output.token_ids == fake_tokens(list(range(10)), 5, vocab_size(engine))
            assert output.finish_reason == "length"
        require_idle(engine)


@pytest.mark.parametrize("length", [1, 17, CONTEXT - 1])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_max_tokens_none_fills_the_context_exactly(tiny_model: Path, length: int, drafter: str | None) -> None:
    with make(tiny_model, drafter=drafter) as engine:
        prompt = list(range(length))
        for params in (wanting(None), wanting(CONTEXT - length)):
            output = engine.generate(ids(*prompt), params)[0]
            assert output.token_ids == fake_tokens(prompt, CONTEXT - length, vocab_size(engine))
            assert output.finish_reason == "length"


@pytest.mark.parametrize("prompt", ["", ids()], ids=["text", "ids"])
def test_empty_prompt(engine: Engine, prompt: Any) -> None:
    assert "the prompt is empty" in refused(engine, prompt)


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (320, "holds token id 320, outside 0..319"),
        (-1, "holds token id -1, outside 0..319"),
        (2**80, f"holds token id {2**80}, outside 0..319"),
        (True, "holds True, which is not an integer token id"),
        (1.0, "holds 1.0, which is not an integer token id"),
        ("1", "holds '1', which is not an integer token id"),
        (None, "holds None, which is not an integer token id"),
    ],
)
def test_ids_that_are_none(engine: Engine, token: Any, says: str) -> None:
    assert f"prompt {says}" in refused(engine, ids(1, token))
    if isinstance(token, int) and not isinstance(token, bool) and token < 2**63:  # params of others cannot be made
        assert f"stop_token_ids {says}" in refused(engine, ids(1), SamplingParams(stop_token_ids=(token,)))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt_token_ids": 5}, "prompt_token_ids must be a list of token ids, not int"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids must be a list of token ids, not str"),
        ({"prompt_token_ids": None}, "prompt_token_ids must be a list of token ids, not NoneType"),
        ({"prompt": "x"}, "holds 'prompt_token_ids' or 'messages', not ['prompt']"),
        ([5], "a prompt is a string"),
        ([b"ab"], "a prompt is a string"),
        ([None], "a prompt is a string"),
        ("a\ud800b", "not valid Unicode"),
    ],
)
def test_prompts_of_no_known_form(engine: Engine, prompt: Any, says: str) -> None:
    assert says in refused(engine, prompt)


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_prompts_that_are_no_list(engine: Engine, prompts: Any) -> None:
    with pytest.raises(RequestError, match=f"not {type(prompts).__name__}"):
        engine.generate(prompts)


def test_no_prompts_give_no_outputs(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_params_must_be_one_or_one_each(engine: Engine) -> None:
    with pytest.raises(RequestError, match="1 sampling params for 2 prompts"):
        engine.generate([ids(1), ids(2)], [GREEDY])
    outputs = engine.generate([ids(1), ids(2)], [wanting(2), wanting(3)])
    assert [len(output.token_ids) for output in outputs] == [2, 3]


def test_a_grammar_without_a_grammar_component_is_refused(engine: Engine) -> None:
    error = refused(engine, ids(1), SamplingParams.model_validate({"max_tokens": 5, "grammar": {"regex": "a"}}))
    assert "asks for a grammar and none is configured" in error


@pytest.mark.parametrize(
    "limits",
    [
        {"max_step_tokens": 1},
        {"max_num_seqs": 1},
        {"max_step_tokens": 1, "max_num_seqs": 1},
        {"max_step_tokens": 2, "max_num_seqs": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("scheduler", ["fcfs", "priority"])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_the_smallest_budgets_change_no_token(
    tiny_model: Path, limits: dict[str, int], scheduler: str, drafter: str | None
) -> None:
    prompts = [[7], [1, 2, 3, 4, 5, 6, 7], [8, 8, 8], [3]]
    with make(tiny_model, engine=limits, scheduler=scheduler, drafter=drafter) as engine:
        outputs = engine.generate([ids(*prompt) for prompt in prompts], GREEDY)
        assert [output.token_ids for output in outputs] == [fake_tokens(p, 8, vocab_size(engine)) for p in prompts]
        require_idle(engine)


def test_seats_and_tokens_are_never_exceeded(tiny_model: Path) -> None:
    with make(tiny_model, engine={"max_num_seqs": 2, "max_step_tokens": 5}, drafter="ngram") as engine:
        seen: list[tuple[int, int]] = []
        core: Any = engine._core
        execute = core._execute

        def watch(step: Any) -> Any:
            seen.append((len(core.roster.running), sum(count for _, count in step.items)))
            return execute(step)

        core._execute = watch
        engine.generate([ids(1, 2, 1, 2, 1, 2, 1)] * 5, GREEDY)
        assert max(seats for seats, _ in seen) == 2
        assert max(tokens for _, tokens in seen) == 5


def test_seeds_are_reported_and_repeat_the_draw(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    first = engine.generate([ids(1)] * 3, params)
    assert len({output.seed for output in first}) == 3
    for output in first:
        again = engine.generate(ids(1), params.model_copy(update={"seed": output.seed}))[0]
        assert (again.token_ids, again.seed) == (output.token_ids, output.seed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": True},
        {"max_tokens": "5"},
        {"seed": "7"},
        {"stop_token_ids": [True]},
        {"ignore_eos": "yes"},
        {"temperature": True},
        {"temperature": "0.5"},
    ],
    ids=str,
)
def test_parameters_of_another_type_are_refused_not_converted(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^SamplingParams: {next(iter(wrong))}"):
        SamplingParams(**wrong)


def test_an_id_that_only_the_tokenizer_knows_is_refused_alone(make_tiny_model: Callable[..., Path]) -> None:
    """The tokenizer has 320 ids, this model's embedding 100: reading id 200 would fail the whole batch."""
    model = make_tiny_model("small_head", vocab_size=100)
    with Engine.from_config(RunConfig.from_dict({"model": {"path": str(model), "dtype": "float32"}})) as engine:
        outputs = engine.generate([ids(1, 2), ids(1, 200), ids(3)], wanting(3))
    assert [output.finish_reason for output in outputs] == ["length", "refused", "length"]
    assert outputs[1].error is not None
    assert "token id 200, outside 0..99" in outputs[1].error
