"""Text, stops and ends of a stream: chunks add up, and a run of accepted drafts is cut exactly where it must end.

A scripted drafter proposes the tokens that the model is going to choose, so whole runs are accepted in one step. The
expected outputs are those without a drafter, cut by the rules of SamplingParams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import ids, real_config, require_idle, write_plugin

from pluglm import Engine, RequestOutput, SamplingParams
from pluglm.kernel.core import Event

ORACLE = """
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter, Proposal


class Oracle(Drafter):
    '''Proposes what follows in `script`, five tokens at a time; longer than any request may become.'''

    Config = ComponentConfig
    interface_version = 2

    def __init__(self, config, context):
        self.script = {}

    def propose(self, requests):
        return [Proposal(self.script.get(tuple(one.token_ids[:2]), [])[len(one.token_ids):][:min(5, one.max_tokens)])
                for one in requests]

    def observe(self, sequence_id, num_accepted, token_ids):
        pass

    def release(self, sequence_id):
        pass
"""
PROMPT = [9, 41]
COUNT = 24


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams.model_validate({"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, **fields})


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    with Engine.from_config(real_config(tiny_model)) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, whole: RequestOutput) -> Iterator[Engine]:
    """The same run with drafts that are always right."""
    folder = tmp_path_factory.mktemp("oracle")
    use = f"{write_plugin(folder, ORACLE, 'oracle')}:Oracle"
    with Engine.from_config(real_config(tiny_model, folder, drafter=use)) as engine:
        engine._core.parts.drafter.script[tuple(PROMPT)] = PROMPT + whole.token_ids  # type: ignore[union-attr]
        yield engine


@pytest.fixture(scope="module")
def whole(plain: Engine) -> RequestOutput:
    """COUNT tokens and no reason to stop earlier; their text is one character or more each, mostly."""
    output = plain.generate(ids(*PROMPT), greedy(logprobs=2))[0]
    assert len(set(output.token_ids)) > 8
    return output


@pytest.fixture(params=["plain", "drafted"])
def engine(request: Any) -> Engine:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def run(engine: Engine, **fields: Any) -> tuple[RequestOutput, list[Event]]:
    """The output and the events that made it."""
    params = greedy(**fields)
    events = list(engine.events(engine.submit(ids(*PROMPT), params)))
    output = engine.generate(ids(*PROMPT), params)[0]
    assert [token for event in events for token in event.token_ids] == output.token_ids
    assert "".join(event.text for event in events) == output.text
    assert sum(len(event.logprobs) for event in events) == len(output.logprobs)
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    require_idle(engine)
    return output, events


def test_drafts_are_accepted_in_whole_runs(drafted: Engine, whole: RequestOutput) -> None:
    output, events = run(drafted, logprobs=2)
    assert output.token_ids == whole.token_ids
    assert max(len(event.token_ids) for event in events) == 6
    assert output.metrics is not None
    assert output.metrics.num_accepted == output.metrics.num_drafted > 15


def test_chunks_add_up_to_the_decoded_tokens(engine: Engine, whole: RequestOutput) -> None:
    chunks = list(engine.stream(ids(*PROMPT), greedy(logprobs=2)))
    text = "".join(chunk.text for chunk in chunks)
    assert text == whole.text == engine.tokenizer.decode(whole.token_ids)
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    logprobs = [one for chunk in chunks for one in chunk.logprobs]
    assert [(one.token_id, len(one.top)) for one in logprobs] == [(token, 2) for token in whole.token_ids]
    assert [chunk.metrics is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_the_last_chunk_says_what_stopped_it(engine: Engine, whole: RequestOutput) -> None:
    token = whole.token_ids[0]
    chunks = list(engine.stream(ids(*PROMPT), greedy(stop_token_ids=[token])))
    assert [(chunk.finish_reason, chunk.stop) for chunk in chunks] == [("stop", token)]


@pytest.mark.parametrize("count", range(1, COUNT))
def test_max_tokens_inside_a_run(engine: Engine, whole: RequestOutput, count: int) -> None:
    output, _ = run(engine, max_tokens=count, logprobs=0)
    assert output.token_ids == whole.token_ids[:count]
    assert output.text == engine.tokenizer.decode(whole.token_ids[:count])
    assert (output.finish_reason, len(output.logprobs)) == ("length", count)


def first_places(whole: RequestOutput) -> list[int]:
    """Places whose token did not occur before."""
    return [i for i, token in enumerate(whole.token_ids) if token not in whole.token_ids[:i]][:10]


def test_eos_and_stop_token_ids_inside_a_run(engine: Engine, whole: RequestOutput, monkeypatch: Any) -> None:
    for place in first_places(whole):
        token = whole.token_ids[place]
        output, _ = run(engine, stop_token_ids=[token], logprobs=0)
        assert output.token_ids == whole.token_ids[: place + 1]
        assert (output.finish_reason, output.stop, len(output.logprobs)) == ("stop", token, place + 1)
        with monkeypatch.context() as patch:
            core = engine._core
            eos = frozenset({token})
            patch.setattr(core, "parts", replaced(core.parts, eos_token_ids=eos))
            ended, _ = run(engine, ignore_eos=False)
            assert (ended.token_ids, ended.finish_reason, ended.stop) == (output.token_ids, "stop", token)
            ignoring, _ = run(engine, ignore_eos=True)
            assert (ignoring.token_ids, ignoring.finish_reason) == (whole.token_ids, "length")


def replaced(parts: Any, **fields: Any) -> Any:
    from dataclasses import replace

    return replace(parts, **fields)


def stops(engine: Engine, whole: RequestOutput) -> list[tuple[str, int]]:
    """Stop strings over two or three tokens, each with the place of the token that completes its first occurrence."""
    decode: Callable[[list[int]], str] = engine.tokenizer.decode
    found: list[tuple[str, int]] = []
    for start in range(COUNT - 3):
        for width in (2, 3):
            text = decode(whole.token_ids[start : start + width])
            if "\N{REPLACEMENT CHARACTER}" in text or not text:
                continue
            ends = [end for end in range(1, COUNT + 1) if text in decode(whole.token_ids[:end])]
            if ends:
                found.append((text, ends[0]))
    return found


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_tokens_cut_ids_text_and_logprobs_together(
    engine: Engine, whole: RequestOutput, include: bool
) -> None:
    cases = stops(engine, whole)
    assert len(cases) > 5
    for text, end in cases:
        output, _ = run(engine, stop=[text, "never there"], include_stop=include, logprobs=1)
        full = engine.tokenizer.decode(whole.token_ids[:end])
        assert output.token_ids == whole.token_ids[:end]
        assert output.text == full[: full.index(text) + (len(text) if include else 0)]
        assert (output.finish_reason, output.stop, len(output.logprobs)) == ("stop", text, end)
        assert output.logprobs == whole.logprobs[:end] or [one.logprob for one in output.logprobs] == [
            one.logprob for one in whole.logprobs[:end]
        ]


def test_a_stop_that_the_last_allowed_token_completes_is_a_stop(engine: Engine, whole: RequestOutput) -> None:
    text, end = stops(engine, whole)[0]
    output, _ = run(engine, stop=text, max_tokens=end)
    assert (output.finish_reason, output.stop, len(output.token_ids)) == ("stop", text, end)
    output, _ = run(engine, stop=text, max_tokens=end - 1)
    assert (output.finish_reason, output.stop) == ("length", None)
    assert output.text == engine.tokenizer.decode(whole.token_ids[: end - 1])


def test_special_tokens_are_shown_only_when_asked_for(tiny_model: Path) -> None:
    """The grammar ends with EOS, which is a control token of this tokenizer."""
    config = real_config(tiny_model, grammar="llguidance")
    params = {"temperature": 0, "max_tokens": 9, "grammar": {"regex": "cat"}}
    with Engine.from_config(config) as engine:
        hidden = engine.generate(ids(*PROMPT), SamplingParams.model_validate(params))[0]
        shown = engine.generate(ids(*PROMPT), SamplingParams.model_validate({**params, "skip_special_tokens": False}))[
            0
        ]
    assert (hidden.text, shown.text) == ("cat", "cat<|end|>")
    assert hidden.token_ids == shown.token_ids
    assert hidden.token_ids[-1] == hidden.stop == 0


def test_a_stop_string_counts_behind_min_tokens_only(engine: Engine, whole: RequestOutput) -> None:
    text, end = stops(engine, whole)[0]
    assert not engine.tokenizer.eos_token_ids & set(whole.token_ids)  # so that min_tokens masks nothing that came
    output, _ = run(engine, stop=text, min_tokens=end - 1)
    assert (output.finish_reason, output.stop, len(output.token_ids)) == ("stop", text, end)
    output, _ = run(engine, stop=text, max_tokens=end, min_tokens=end)
    assert (output.finish_reason, output.stop) == ("length", None)
    assert output.text == engine.tokenizer.decode(whole.token_ids[:end])
