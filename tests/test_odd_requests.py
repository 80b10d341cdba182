"""Requests and limits that nobody sends on purpose: refused in one line, or answered like any other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, real_config, require_idle, vocab_size

from pluglm import Engine, PluglmError, SamplingParams
from pluglm.kernel import sampling_params as kernel
from pluglm.kernel.errors import RequestError

LONE = "\ud800"  # a surrogate without its partner
CACHED = {"use": "hash_prefix", "block_size": 4, "num_blocks": 32}
POLICIES = ["fcfs", {"use": "priority", "ageing": "1s"}, "deadline", "mlfq", "fair", "shortest_first", "prefix_first"]


@pytest.mark.parametrize("scheduler", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"priority": True}, "priority must be int, not bool"),
        ({"priority": 10**400}, "priority must be an integer from -1000000000 to 1000000000, not one of 1329 bits"),
        ({"priority": -(10**5000)}, "priority must be an integer from"),  # Python does not even print it
        ({"deadline_s": True}, "deadline_s must be a number, not bool"),
        ({"deadline_s": 10**400}, "deadline_s must be a number of seconds above 0, not one of 1329 bits"),
        ({"deadline_s": float("inf")}, "deadline_s must be a number of seconds above 0, not inf"),
    ],
    ids=["priority-bool", "priority-huge", "priority-endless", "deadline-bool", "deadline-huge", "deadline-inf"],
)
def test_an_odd_option_is_refused_and_harms_nobody(
    tiny_model: Path, scheduler: Any, options: dict[str, Any], reason: str
) -> None:
    with Engine(fake_config(tiny_model, scheduler=scheduler)) as engine:
        mate = engine.submit(ids(7, 8, 9), GREEDY)
        with pytest.raises(RequestError, match=reason) as refusal:
            engine.submit(ids(1, 2), GREEDY, **options)
        assert "\n" not in str(refusal.value)
        tokens = [token for event in engine.events(mate) for token in event.token_ids]
        assert tokens == fake_tokens([7, 8, 9], 8, vocab_size(engine))
        require_idle(engine)


@pytest.mark.parametrize("scheduler", POLICIES, ids=str)
def test_the_ends_of_what_is_allowed_are_served(tiny_model: Path, scheduler: Any) -> None:
    """The largest deadline is that of a float64, whose sum with any time of the clock is finite."""
    with Engine(fake_config(tiny_model, scheduler=scheduler)) as engine:
        for options in ({"priority": 10**9}, {"priority": -(10**9)}, {"deadline_s": 1.7e308}):
            name = engine.submit(ids(7, 8, 9), GREEDY, **options)
            assert list(engine.events(name))[-1].finish_reason == "length"
        require_idle(engine)


def test_a_number_of_tokens_that_python_does_not_print_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^SamplingParams: max_tokens: .* less than .* \(got one of type int\)$"):
        SamplingParams(max_tokens=10**5000)


@pytest.mark.parametrize("use", ["hash_prefix", "radix"])
def test_any_text_is_a_salt_of_its_own(tiny_model: Path, tmp_path: Path, use: str) -> None:
    """Also one that UTF-8 has no bytes for; a pair of surrogates is not the character that they stand for in UTF-16."""
    prompt, salts = ids(*range(10, 31)), [LONE, "\udc00", f"{LONE}\udc00", "\U00010000", "?"]
    with Engine(fake_config(tiny_model, kv={**CACHED, "use": use, "num_blocks": 64})) as engine:
        for salt in salts:
            for num_cached in (0, 20):
                events = list(engine.events(engine.submit(prompt, GREEDY, salt=salt)))
                assert events[-1].metrics is not None
                assert events[-1].metrics.num_cached_tokens == num_cached
        saved = engine.save_kv(prompt, tmp_path / "saved.kv", salt=LONE)
        engine.reset_prefix_cache()
        assert "another salt" in engine.load_kv(tmp_path / "saved.kv", salt="?").reason
        assert engine.load_kv(tmp_path / "saved.kv", salt=LONE).num_tokens == saved.num_tokens
        require_idle(engine)


def test_a_prompt_that_no_queue_holds_is_not_told_to_come_again(tiny_model: Path) -> None:
    with Engine(fake_config(tiny_model, engine={"max_waiting_tokens": 4})) as engine:
        with pytest.raises(RequestError, match=r"this one has 5, of at most 4 .*; shorten it, or raise that limit$"):
            engine.submit(ids(1, 2, 3, 4, 5), GREEDY)
        engine.submit(ids(1, 2, 3), GREEDY)
        with pytest.raises(RequestError, match=r"3 prompt tokens wait already .*; try again later$"):
            engine.submit(ids(1, 2, 3), GREEDY)


@pytest.mark.parametrize("key", ["max_num_seqs", "max_step_tokens"])
def test_a_limit_beyond_any_machine_is_refused(tiny_model: Path, key: str) -> None:
    with pytest.raises(PluglmError, match=rf"engine.{key}: Input should be less than"):
        fake_config(tiny_model, engine={key: 10**30})


def test_a_scheduler_that_waits_for_a_tier_is_not_taken_for_stuck(tiny_model: Path) -> None:
    """The next lane's KV never comes, and nobody else can start: it is computed after the timeout, not given up."""
    slots = {
        "kv": {"use": "radix", "block_size": 2, "num_blocks": 6},
        "kv_tiers": [{"use": "kv_tier_cases:OpenTier"}],
        "engine": {"max_num_seqs": 1, "max_step_tokens": 16, "kv_tier_timeout_s": 60.0},
    }
    one = {"temperature": 0, "ignore_eos": True}
    requests = [
        (ids(5, 6, 7), SamplingParams(max_tokens=3, n=3, **one)),
        (ids(4, 4, 4, 4, 4), SamplingParams(max_tokens=3, search={"width": 3}, **one)),
        (ids(5, 6, 7), SamplingParams(max_tokens=2, search={"width": 2}, **one)),
    ]
    config = fake_config(tiny_model, Path(__file__).parent, scheduler="static_batch", search="beam", **slots)
    with Engine(config) as engine:
        answers = [engine.generate([one for one, _ in requests], [one for _, one in requests]) for _ in range(3)]
        assert [output.error for outputs in answers for output in outputs] == [None] * 9
        for outputs in answers[1:]:
            assert [[lane.token_ids for lane in one.completions] for one in outputs] == [
                [lane.token_ids for lane in one.completions] for one in answers[0]
            ]
        assert engine.kv_tiers["kv_tier_cases:OpenTier"].num_late > 0, "the tier was asked"
        require_idle(engine)


def test_a_disk_tier_that_cannot_be_written_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the system, since whoever may write everywhere has no such folder."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    tier = {"use": "pluglm_prefix_cache.disk_tier:DiskTier", "path": str(tmp_path)}
    with pytest.raises(PluglmError, match=rf"{tmp_path} cannot be used: it is not yours to read and write"):
        Engine(fake_config(tiny_model, kv=CACHED, kv_tiers=[tier]))


def test_the_log_says_which_output_a_token_belongs_to(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with Engine(fake_config(tiny_model, hooks=[{"use": "events", "path": str(log)}])) as engine:
        params = SamplingParams(n=3, max_tokens=4, seed=1, ignore_eos=True)
        output = engine.generate(ids(1, 2, 3), params)[0]
    lanes: dict[int, list[int]] = {}
    for line in map(json.loads, log.read_text(encoding="utf-8").splitlines()):
        if "token_ids" in line:
            lanes.setdefault(line["lane"], []).extend(line["token_ids"])
    assert lanes == {number: list(one.token_ids) for number, one in enumerate(output.completions)}


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"best_of": -1}, "best_of"),
        ({"bad_words": "blue"}, "bad_words"),
        ({"tempreture": 1.0}, "temperature"),
        ({"mirostat": 2, "min_p": 0.1}, "mirostat"),
        ({"best_of": 2, "n": "x"}, "n: "),
        ({"best_of": 2, "logprobs": "x", "prompt_logprobs": "y"}, "logprobs"),
        ({"grammar": SamplingParams(grammar={"regex": "a"}).grammar.model_copy(update={"kind": 3})}, "grammar.kind"),
    ],
    ids=str,
)
def test_params_changed_by_a_copy_are_checked(tiny_model: Path, update: dict[str, Any], says: str) -> None:
    good = SamplingParams(temperature=0.0, max_tokens=2)
    with Engine.from_config(real_config(tiny_model)) as engine:
        bad, other = engine.generate([{"prompt_token_ids": [5]}] * 2, [good.model_copy(update=update), good])
    assert bad.finish_reason == "refused"
    assert bad.error is not None
    assert says in bad.error
    assert "\n" not in bad.error
    assert other.finish_reason in ("stop", "length")


@pytest.mark.parametrize("kind", [SamplingParams, kernel.SamplingParams])
def test_changed_params_of_one_request_are_checked(tiny_model: Path, kind: type[kernel.SamplingParams]) -> None:
    with Engine(fake_config(tiny_model)) as engine:
        for call in (engine.submit, engine.stream):
            with pytest.raises(RequestError, match="params: n: "):
                call(ids(5), kind(max_tokens=2).model_copy(update={"n": "x"}))
        require_idle(engine)


def test_a_refused_output_has_an_id_of_its_own(tiny_model: Path) -> None:
    with Engine(fake_config(tiny_model)) as engine:
        outputs = engine.generate([ids(5), ids(), ids(6)], GREEDY)
        assert [one.request_id for one in outputs] == ["request-0", "request-1", "request-2"]
        assert [one.finish_reason for one in outputs] == ["length", "refused", "length"]


def test_whoever_takes_the_id_of_a_refused_request_keeps_it(tiny_model: Path) -> None:
    """It is free again at once, while the others of the batch still run."""
    taken = list[str]()

    def take(what: str, done: int, total: int) -> None:
        taken.extend([] if taken else [engine.submit(ids(7, 8, 9), GREEDY, request_id="request-1")])

    with Engine(fake_config(tiny_model)) as engine:
        outputs = engine.generate([ids(5), ids()], GREEDY.model_copy(update={"best_of": 2}), progress=take)
        assert [one.finish_reason for one in outputs] == ["length", "refused"]
        assert outputs[1].completions == []
        tokens = [token for event in engine.events(*taken) for token in event.token_ids]
        assert tokens == fake_tokens([7, 8, 9], 8, vocab_size(engine))
        require_idle(engine)
