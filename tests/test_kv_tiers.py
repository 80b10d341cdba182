"""Evicted KV comes back from tiers when that is faster, and never changes an answer, whatever a tier does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, real_config, require_idle, vocab_size
from kv_file_cases import answer, cached, num_cached
from kv_tier_cases import BLOCK_SIZE, HOST, PROMPTS, disk, tier_of, tiered

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.kernel.errors import IncompatibleError, PluginError
from pluglm.kv.tier_costs import LOSSES, TRIAL_BLOCKS

WHOLE = 36  # tokens of a prompt of 40 in whole blocks before its last token
TIMED, OPEN, FAULTY = (f"kv_tier_cases:{name}" for name in ("TimedTier", "OpenTier", "FaultyTier"))


def num_loaded(output: Any) -> int:
    return int(output.metrics.num_loaded_tokens)


def counts(engine: Engine) -> Any:
    return next(iter(engine.kv_tiers.values()))


def words(engine: Engine, number: int) -> list[int]:
    """What the fake backend says to a prompt of PROMPTS."""
    return fake_tokens(PROMPTS[number]["prompt_token_ids"], 8, vocab_size(engine))


@pytest.mark.parametrize("make", [fake_config, real_config], ids=["fake", "real"])
@pytest.mark.parametrize("use", ["hash_prefix", "radix"])
@pytest.mark.parametrize("kinds", ["host", "disk", "both"])
def test_answers_are_those_without_tiers(tiny_model: Path, tmp_path: Path, make: Any, use: str, kinds: str) -> None:
    tiers = {"host": [HOST], "disk": [disk(tmp_path)], "both": [HOST, disk(tmp_path)]}[kinds]
    order = (0, 1, 2, 0, 1, 2, 0, 0)
    with Engine(tiered(tiny_model, use=use, make=make)) as plain:
        expected = [answer(plain, PROMPTS[one]).token_ids for one in order]
    with Engine(tiered(tiny_model, *tiers, use=use, make=make)) as engine:
        outputs = [answer(engine, PROMPTS[one]) for one in order]
        assert [output.token_ids for output in outputs] == expected
        require_idle(engine)
        assert [num_cached(output) for output in outputs[:3]] == [0, 0, 0]
        if kinds == "host" and make is fake_config:  # nothing else takes the same time on every machine
            assert [num_loaded(output) for output in outputs] == [0, 0, 0, WHOLE, WHOLE, WHOLE, WHOLE, 0]
            assert all(num_cached(output) == WHOLE for output in outputs[3:7]), "what came is adopted"
        assert sum(num_loaded(output) for output in outputs) == BLOCK_SIZE * sum(
            one.num_loaded for one in engine.kv_tiers.values()
        )
        assert num_loaded(outputs[3]) > 0, "a tier that was never measured is tried"
        assert sum(one.num_failed + one.num_late for one in engine.kv_tiers.values()) == 0


@pytest.mark.parametrize("use", ["hash_prefix", "radix"])
@pytest.mark.parametrize("seed", range(6))
def test_busy_engines_agree_with_the_fake_backends_words(tiny_model: Path, tmp_path: Path, use: str, seed: int) -> None:
    """Requests of shared beginnings come, go and are cancelled while pools and tiers are too small for them."""
    generator = random.Random(f"{use} {seed}")
    tiers = [{**HOST, "bytes": 20_000}, disk(tmp_path, bytes=60_000)][: generator.randint(1, 2)]
    engine_keys = {"max_num_seqs": 3, "max_step_tokens": generator.choice([7, 64])}
    texts: dict[str, list[int]] = {}
    with Engine(tiered(tiny_model, *tiers, use=use, engine=engine_keys, kv={"num_blocks": 18})) as engine:
        size, tokens = vocab_size(engine), dict[str, list[int]]()
        for _ in range(200):
            if generator.random() < 0.3 and len(engine._core.roster.requests) < 6:
                start, length = generator.choice([5, 60, 120]), generator.randint(2, 40)
                prompt = [*range(start, start + length), *([generator.randrange(9)] * generator.randint(0, 3))]
                texts[engine.submit(ids(*prompt), GREEDY)] = prompt
            elif generator.random() < 0.05 and texts:
                engine.cancel(generator.choice(list(texts)))
            engine.step()
            engine._core.kv.audit()
        for request_id, prompt in texts.items():
            events = list(engine.events(request_id))
            tokens[request_id] = [one for event in events for one in event.token_ids]
            reason = events[-1].finish_reason
            assert reason in ("length", "cancelled"), events[-1].error
            assert tokens[request_id] == fake_tokens(prompt, len(tokens[request_id]), size)
            assert reason == "cancelled" or len(tokens[request_id]) == 8
        require_idle(engine)
        assert sum(one.num_loaded for one in engine.kv_tiers.values()) > 0


def test_preempted_requests_find_their_kv_again(tiny_model: Path) -> None:
    """Two that do not fit together push each other out all the time."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with Engine(tiered(tiny_model, HOST, kv={"num_blocks": 16})) as engine:
        prompts = [list(range(start, start + 20)) for start in (5, 60)]
        outputs = engine.generate([ids(*prompt) for prompt in prompts], params)
        size = vocab_size(engine)
        assert [one.token_ids for one in outputs] == [fake_tokens(prompt, 30, size) for prompt in prompts]
        assert sum(one.metrics.num_preemptions for one in outputs if one.metrics) > 0
        require_idle(engine)


def test_what_is_recomputed_sooner_is_not_loaded(tiny_model: Path) -> None:
    """On a clock where a token takes 0.0003 s to compute, and so a block 0.0012 s."""
    backend = {"use": "fake", "step_base_s": 0.0, "token_s": 0.0003}
    for seconds, is_faster in ((0.0011, True), (0.0013, False)):
        with Engine(tiered(tiny_model, {"use": TIMED, "seconds": seconds}, backend=backend)) as engine:
            outputs = [answer(engine, PROMPTS[number % 3]) for number in range(9)]
            first, later = (WHOLE, WHOLE) if is_faster else (TRIAL_BLOCKS * BLOCK_SIZE, 0)
            assert [num_loaded(one) for one in outputs] == [0, 0, 0, first, *[later] * 5], "the trial shows it"
            assert counts(engine).num_slow == (0 if is_faster else 6), "once a request"
            for number, output in enumerate(outputs):
                assert output.token_ids == words(engine, number % 3)


def test_a_tier_that_lost_for_long_is_measured_anew(tiny_model: Path) -> None:
    with Engine(tiered(tiny_model, {"use": TIMED, "seconds": 1.0})) as engine:
        loaded = [num_loaded(answer(engine, PROMPTS[number % 3])) for number in range(4)]
        assert loaded == [0, 0, 0, TRIAL_BLOCKS * BLOCK_SIZE], "which loses once, after its trial"
        tier_of(engine).seconds = 0.0
        loaded = [num_loaded(answer(engine, PROMPTS[number % 3])) for number in range(4, LOSSES + 4)]
        assert loaded == [*[0] * (LOSSES - 1), WHOLE], "it is fast now"


def test_of_two_tiers_the_one_that_pays_is_asked(tiny_model: Path) -> None:
    slow, fast = {"use": TIMED, "seconds": 1.0}, {"use": TIMED, "seconds": 0.0}
    with Engine(tiered(tiny_model, slow, fast)) as engine:
        for number in range(6):
            output = answer(engine, PROMPTS[number % 3])
            assert output.token_ids == words(engine, number % 3)
            assert num_loaded(output) == (0 if number < 3 else WHOLE)
        first, second = engine.kv_tiers.values()
        assert first.num_loaded == TRIAL_BLOCKS
        assert second.num_loaded == 3 * WHOLE // BLOCK_SIZE - TRIAL_BLOCKS
        assert list(engine.kv_tiers) == [TIMED, f"{TIMED}#1"]


def evict_first_prompt(engine: Engine) -> None:
    for prompt in PROMPTS[:2]:
        answer(engine, prompt)


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
def test_a_load_that_never_ends_is_given_up_at_its_deadline(tiny_model: Path, others: int) -> None:
    config = tiered(tiny_model, OPEN, kv={"num_blocks": 30}, engine={"kv_tier_timeout_s": 0.5})
    long = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    with Engine(config) as engine:
        for prompt in (*PROMPTS, ids(*range(200, 240))):
            answer(engine, prompt)
        beside = [engine.submit(ids(250 + one), long) for one in range(others)]
        started_s = engine._core.now()
        output = answer(engine, PROMPTS[0])
        assert output.token_ids == words(engine, 0)
        assert num_loaded(output) == 0
        leases = tier_of(engine).leases
        assert len(leases) == TRIAL_BLOCKS == counts(engine).num_late
        assert [lease.num_cancels for lease in leases] == [1] * TRIAL_BLOCKS
        if others:
            waited_s = output.metrics.first_token_s - started_s if output.metrics else 0
            assert 0.5 <= waited_s < 0.6, "others went on meanwhile"
        for request_id in beside:
            assert list(engine.events(request_id))[-1].finish_reason == "length"
        for lease in leases:  # nobody cares any more
            lease.state = "ok"
        assert answer(engine, PROMPTS[0]).token_ids == output.token_ids
        assert len(leases) == TRIAL_BLOCKS
        assert engine._core.roster.held_out == set()
        require_idle(engine)


def test_others_go_on_while_a_load_is_on_its_way(tiny_model: Path) -> None:
    with Engine(tiered(tiny_model, OPEN, kv={"num_blocks": 30})) as engine:
        for prompt in (*PROMPTS, ids(*range(200, 240))):
            answer(engine, prompt)
        waiting = engine.submit(PROMPTS[0], GREEDY)
        engine.step()
        assert len(engine._core.roster.held_out) == 1
        beside = answer(engine, ids(9, 8, 7))
        assert beside.token_ids == fake_tokens([9, 8, 7], 8, vocab_size(engine))
        assert engine._core.roster.held_out, "still on its way"
        tier = tier_of(engine)
        while engine._core.is_live(waiting):
            for lease in tier.leases:
                lease.state = "ok"
            engine.step()
        events = list(engine.events(waiting))
        metrics = events[-1].metrics
        assert metrics is not None
        assert metrics.num_loaded_tokens == WHOLE
        assert metrics.num_cached_tokens == WHOLE
        require_idle(engine)


@pytest.mark.parametrize("end", ["cancel", "deadline", "close", "reset"])
def test_whoever_ends_gives_its_loads_up(tiny_model: Path, end: str) -> None:
    with Engine(tiered(tiny_model, OPEN, kv={"num_blocks": 30})) as engine:
        for prompt in (*PROMPTS, ids(*range(200, 240))):
            answer(engine, prompt)
        request_id = engine.submit(PROMPTS[0], GREEDY, deadline_s=0.005 if end == "deadline" else None)
        engine.submit(ids(3, 2, 1), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        engine.step()
        leases = list(tier_of(engine).leases)
        assert leases
        if end == "cancel":
            engine.cancel(request_id)
        elif end == "close":
            engine.close()
        elif end == "reset":
            engine.reset_prefix_cache()
        if end != "close":
            engine.step()
            engine.step()
            assert engine._core.roster.held_out == set()
        assert [lease.num_cancels for lease in leases] == [1] * len(leases)


def test_stores_that_never_end_are_given_up(tiny_model: Path) -> None:
    config = tiered(tiny_model, {"use": OPEN, "stores": True}, engine={"kv_tier_timeout_s": 0.05})
    with Engine(config) as engine:
        evict_first_prompt(engine)
        answer(engine, PROMPTS[2])
        answer(engine, ids(1, 2, 3))
        tier = tier_of(engine)
        assert counts(engine).num_late == sum(lease.num_cancels for lease in tier.leases) > 0
        assert counts(engine).num_stored == 0
        require_idle(engine)


def test_stores_on_their_way_end_with_a_reset(tiny_model: Path) -> None:
    with Engine(tiered(tiny_model, {"use": OPEN, "stores": True})) as engine:
        evict_first_prompt(engine)
        leases = tier_of(engine).leases
        engine.reset_prefix_cache()
        assert leases
        assert [lease.num_cancels for lease in leases] == [1] * len(leases)


@pytest.mark.parametrize("method", ["has", "store", "load", "wait", "clear", "close"])
def test_a_tier_that_raises_is_used_no_more(tiny_model: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    """By a warning with its name; the other tier and all requests go on."""
    with Engine(tiered(tiny_model, {"use": FAULTY, "method": method}, HOST)) as engine:
        outputs = [answer(engine, PROMPTS[number % 3]) for number in range(6)]
        if method == "clear":
            engine.reset_prefix_cache()
        elif method != "close":
            assert num_loaded(outputs[-1]) == WHOLE, "of the tier that is left"
        for number, output in enumerate(outputs):
            assert output.token_ids == words(engine, number % 3)
        require_idle(engine)
    warnings = [record.message for record in caplog.records if f"kv tier '{FAULTY}'" in record.message]
    assert len(warnings) == 1
    assert f"raised OSError: no {method}" in warnings[0]


@pytest.mark.parametrize("tensors", ["few", "dtype", "shape", "none"])
def test_other_tensors_never_get_into_the_store(tiny_model: Path, tensors: str) -> None:
    with Engine(tiered(tiny_model, {"use": FAULTY, "tensors": tensors})) as engine:
        for number in range(6):
            output = answer(engine, PROMPTS[number % 3])
            assert output.token_ids == words(engine, number % 3)
            assert num_loaded(output) == 0
        assert counts(engine).num_failed > 0
        require_idle(engine)


def test_a_load_that_fails_is_recomputed(tiny_model: Path) -> None:
    with Engine(tiered(tiny_model, {"use": FAULTY, "method": "lease"})) as engine:
        evict_first_prompt(engine)
        output = answer(engine, PROMPTS[0])
        assert output.token_ids == words(engine, 0)
        assert counts(engine).num_failed == TRIAL_BLOCKS
        require_idle(engine)


def test_salts_stay_apart(tiny_model: Path) -> None:
    with Engine(tiered(tiny_model, HOST)) as engine:
        for prompt in PROMPTS:
            answer(engine, prompt, salt="one")
        assert num_loaded(answer(engine, PROMPTS[0], salt="two")) == 0
        assert num_loaded(answer(engine, PROMPTS[0], salt="one")) == WHOLE


def test_a_reset_reaches_the_tiers(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiered(tiny_model, HOST, disk(tmp_path))) as engine:
        evict_first_prompt(engine)
        engine.reset_prefix_cache()
        assert num_cached(answer(engine, PROMPTS[0])) == 0


def test_blocks_that_a_file_pushes_out_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiered(tiny_model, HOST)) as engine:
        answer(engine, PROMPTS[0])
        engine.save_kv(PROMPTS[0], tmp_path / "kv")
        answer(engine, PROMPTS[1])
        assert engine.load_kv(tmp_path / "kv").num_tokens == 40
        output = answer(engine, PROMPTS[1])
        assert num_loaded(output) > 0
        assert output.token_ids == words(engine, 1)


def test_tiers_need_a_manager_that_says_what_it_evicts(tiny_model: Path) -> None:
    for kv in ("paged", "contiguous"):
        with pytest.raises(IncompatibleError, match=rf"kv '{kv}'.*cannot run with kv_tiers.*hash_prefix"):
            Engine(fake_config(tiny_model, kv=kv, kv_tiers=[HOST]))
    with pytest.raises(PluginError, match=r"kv_tiers\.0: kv_tier 'hots' is not installed"):
        Engine(cached(tiny_model, kv_tiers=["hots"]))


def test_the_plan_shows_the_tiers(tiny_model: Path) -> None:
    config: RunConfig = tiered(tiny_model, {**HOST, "bytes": 7}, HOST)
    with Engine(config) as engine:
        plan = engine.run.plan()
        assert plan[f"kv_tiers.{HOST['use']}"]["config"] == {"bytes": 7}
        assert f"kv_tiers.{HOST['use']}#1" in plan
