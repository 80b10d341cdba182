"""What a run says of its drafts, against cases counted by hand: every window once, whatever ends it.

A scripted drafter proposes, window by window, so many of the tokens to come and then so many others. The tokens to come
are the documented hash of the fake backend.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, fake_tokens, ids, require_idle, vocab_size, write_plugin
from step_cases import Steps, takes

from pluglm import Engine, SamplingParams
from pluglm.acceptance_alarm import AcceptanceAlarm
from pluglm.verification.counts import SpeculationCounts

SCRIPTED = """
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter, Proposal


class Scripted(Drafter):
    '''truth: prompt -> the tokens behind it. script: of one window, how many drafts are right and how many wrong.'''

    Config = ComponentConfig
    interface_version = 2

    def __init__(self, config, context):
        self.truth, self.script, self.width, self.num_proposed = {}, {}, context.spec.vocab_size, 0

    def propose(self, requests):
        return [Proposal(self.drafts(one)) for one in requests]

    def drafts(self, one):
        script = self.script.get(one.request.prompt_token_ids, [])
        if len(script) <= one.position:
            return []
        right, wrong = script[one.position]
        coming = self.truth[one.request.prompt_token_ids][one.position:][:right + wrong]
        wrongly = [token if place < right else (token + 1) % self.width for place, token in enumerate(coming)]
        self.num_proposed += len(wrongly[:one.max_tokens])
        return wrongly[:one.max_tokens]

    def observe(self, sequence_id, num_accepted, token_ids):
        pass

    def release(self, sequence_id):
        pass
"""
PROMPT = (9, 41)
Script = list[tuple[int, int]]  # at the place of each output token that a window may begin with


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams.model_validate({"temperature": 0, "ignore_eos": True, **fields})


def make(tiny_model: Path, folder: Path, **slots: Any) -> Engine:
    use = f"{write_plugin(folder, SCRIPTED, 'scripted')}:Scripted"
    return Engine.from_config(fake_config(tiny_model, folder, drafter=use, **slots))


def teach(engine: Engine, script: Script, prompt: tuple[int, ...] = PROMPT, count: int = 160) -> list[int]:
    """The tokens to come. The drafter knows them, and what to make of them."""
    drafter: Any = engine.core.parts.drafter
    drafter.truth[prompt] = fake_tokens(list(prompt), count, vocab_size(engine))
    drafter.script[prompt] = script
    return drafter.truth[prompt]  # type: ignore[no-any-return]


def counted(metrics: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    counts = metrics.speculation
    assert (metrics.num_drafted, metrics.num_accepted) == (counts.num_drafted, counts.num_accepted)
    return counts.num_windows, counts.num_tokens, counts.drafted_by_position, counts.accepted_by_position


def run(engine: Engine, **fields: Any) -> Any:
    output = engine.generate(ids(*PROMPT), greedy(**fields))[0]
    assert output.metrics is not None
    require_idle(engine)
    return output


def test_a_run_counted_by_hand(tiny_model: Path, tmp_path: Path) -> None:
    """Output tokens 0 | 1 to 3 | 4 | 5 to 8 | 9 | 10 and 11. At 10 there is room for one of the three drafts."""
    script = [(0, 0), (2, 1), (0, 0), (0, 0), (0, 3), (3, 0), (0, 0), (0, 0), (0, 0), (0, 0), (3, 0)]
    with make(tiny_model, tmp_path) as engine:
        truth = teach(engine, script)
        output = run(engine, max_tokens=12)
    assert output.token_ids == truth[:12]
    assert counted(output.metrics) == (6, 12, (4, 3, 3), (3, 2, 1))
    counts = output.metrics.speculation
    assert (counts.tokens_per_step, counts.accepted_per_step) == (2.0, 1.0)
    assert counts.acceptance_by_position == (3 / 4, 2 / 3, 1 / 3)


@pytest.mark.parametrize(
    ("stop_at", "expected"),
    [
        (0, (1, 1, (), ())),
        (2, (2, 3, (1, 1, 1, 1), (1, 1, 0, 0))),  # the second of four right drafts: those behind it are not kept
        (4, (2, 5, (1, 1, 1, 1), (1, 1, 1, 1))),  # the last of them: the token behind it is not committed
        (5, (2, 6, (1, 1, 1, 1), (1, 1, 1, 1))),  # the token behind them
    ],
)
def test_a_window_that_a_stop_cuts_counts(
    tiny_model: Path, tmp_path: Path, stop_at: int, expected: tuple[Any, ...]
) -> None:
    with make(tiny_model, tmp_path) as engine:
        truth = teach(engine, [(0, 0), (4, 0)])
        assert truth[stop_at] not in truth[:stop_at]
        output = run(engine, max_tokens=50, stop_token_ids=[truth[stop_at]])
    assert (output.finish_reason, output.token_ids) == ("stop", truth[: stop_at + 1])
    assert counted(output.metrics) == expected


def test_without_a_drafter_a_step_gives_a_token(tiny_model: Path) -> None:
    """Steps that compute a part of a prompt only are no windows: 11 prompt tokens take three of four."""
    with Engine.from_config(fake_config(tiny_model, engine={"max_step_tokens": 4})) as engine:
        metrics: Any = engine.generate(ids(*range(20, 31)), greedy(max_tokens=7))[0].metrics
    assert counted(metrics) == (7, 7, (), ())
    assert (metrics.speculation.tokens_per_step, metrics.speculation.accepted_per_step) == (1.0, 0.0)


def test_the_sequences_of_a_request_add_up(tiny_model: Path, tmp_path: Path) -> None:
    """Three greedy outputs are equal: each is 0 | 1 to 3 | 4, with one of two drafts kept first, and no room then."""
    with make(tiny_model, tmp_path) as engine:
        truth = teach(engine, [(0, 0), (2, 1)])
        output = run(engine, max_tokens=5, n=3)
        assert [one.token_ids for one in output.completions] == [truth[:5]] * 3
    assert counted(output.metrics) == (9, 15, (3, 3, 3), (3, 3, 0))


def test_a_cancelled_request_has_what_it_did(tiny_model: Path, tmp_path: Path) -> None:
    with make(tiny_model, tmp_path) as engine:
        teach(engine, [(0, 0), (1, 1)])
        steps = Steps(engine)
        steps.add("a", list(PROMPT), greedy(max_tokens=50))
        steps.step(2)
        engine.core.cancel("a")
        steps.step()
        assert counted(steps.metrics("a")) == (2, 3, (1, 1), (1, 0))


@pytest.mark.parametrize("mode", ["recompute", "offload", "pause"])
def test_drafts_that_preemption_drops_do_not_count(tiny_model: Path, tmp_path: Path, mode: str) -> None:
    """Output tokens 0 | 1 | 2 and 3 | 4. The drafts that were proposed at 1 never ran, and none were proposed anew."""
    slots = {"scheduler": takes(tmp_path, mode), "engine": {"max_num_seqs": 1}}
    with make(tiny_model, tmp_path, **slots) as engine:
        truth = teach(engine, [(0, 0), (2, 0), (1, 1)])
        drafter: Any = engine.core.parts.drafter
        steps = Steps(engine)
        steps.add("a", list(PROMPT), greedy(max_tokens=5))
        steps.step()
        steps.add("b", [7, 8], greedy(max_tokens=1), priority=-1)
        steps.step()
        assert (drafter.num_proposed, steps.sequence("a").drafts, steps.sequence("a").num_preemptions) == (2, [], 1)
        steps.finish()
        assert steps.tokens("a") == truth[:5]
        assert drafter.num_proposed == 4
        assert counted(steps.metrics("a")) == (4, 5, (1, 1), (1, 0))
        require_idle(engine)


def test_a_search_has_no_windows(tiny_model: Path) -> None:
    with Engine.from_config(fake_config(tiny_model, search="beam", drafter="ngram")) as engine:
        metrics: Any = engine.generate(ids(*PROMPT), greedy(max_tokens=4, search={"width": 2}))[0].metrics
    assert metrics.num_output_tokens == 4
    assert (counted(metrics), metrics.speculation.tokens_per_step) == ((0, 0, (), ()), None)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "drafts were kept" in one.getMessage()]


@pytest.mark.parametrize(
    ("num_right", "expected"), [(1, []), (0, ["drafter 'scripted:Scripted': 0 of 500 drafts were kept"])]
)
def test_drafts_that_are_hardly_ever_kept_are_told_once(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, num_right: int, expected: list[str]
) -> None:
    """Ten drafts a window at the places 1 to 25: 250 of a request when all are wrong, 130 when the first is right."""
    with make(tiny_model, tmp_path) as engine, caplog.at_level(logging.WARNING, logger="pluglm"):
        teach(engine, [(0, 0), *[(num_right, 10 - num_right)] * 25])
        assert run(engine, max_tokens=40).metrics.num_drafted == (130 if num_right else 250)
        assert warnings_of(caplog) == []
        for _ in range(4):
            run(engine, max_tokens=40)
    assert [one.partition(", ")[0] for one in warnings_of(caplog)] == expected


def stretch(drafted: int, accepted: int) -> SpeculationCounts:
    return SpeculationCounts(num_windows=drafted, drafted_by_position=(drafted,), accepted_by_position=(accepted,))


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([(499, 0)], []),
        ([(500, 10)], []),
        ([(250, 9), (250, 0), (250, 0)], ["9 of 500"]),
        ([(600, 300), (300, 0), (300, 2), (500, 0)], ["2 of 600"]),  # what came before does not hide it
        ([(0, 0)] * 600, []),
    ],
)
def test_fewer_than_two_percent_of_five_hundred(
    requests: list[tuple[int, int]], expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    alarm = AcceptanceAlarm("drafter 'x'")
    with caplog.at_level(logging.WARNING, logger="pluglm"):
        for drafted, accepted in requests:
            alarm.note(stretch(drafted, accepted))
    assert [one.partition(": ")[2].partition(" drafts")[0] for one in warnings_of(caplog)] == expected
