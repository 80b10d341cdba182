"""engine.verification is what it says or the run is refused; processed log-probabilities are of the final rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, ids, write_plugin
from law_cases import NUM_TOKENS, PARAMS, final_row, params_of

from pluglm import Engine, SamplingParams
from pluglm.assembly.resolving import resolve
from pluglm.kernel.errors import IncompatibleError, PluginError, RequestError
from pluglm.testing.lossless_filters import PROMPT

DRAWS = {"use": "draft_model", "model": "x", "draws": True}
WITHOUT_ROWS = """
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import Sampler

class Plain(Sampler):
    Config = ComponentConfig
    interface_version = 1
    def __init__(self, config, context): pass
    def sample(self, logits_RV, rows): return logits_RV.argmax(-1).tolist()
"""
VERSION_1 = """
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter

class Old(Drafter):
    Config = ComponentConfig
    interface_version = 1
    def __init__(self, config, context): pass
    def propose(self, requests): return [[] for _ in requests]
    def observe(self, sequence_id, num_accepted, token_ids): pass
    def release(self, sequence_id): pass
"""


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("slots", "says"),
    [
        ({}, "verifies nothing without a drafter; add one that provides 'drafter:rows'"),
        ({"drafter": "ngram"}, "drafter 'ngram'.* cannot run with .*: it does not provide 'drafter:rows'"),
        ({"drafter": "ngram"}, "'drafter:rows'; use one that draws, such as draft_model with draws: true, or leave"),
        ({"drafter": {**DRAWS, "draws": False}}, "drafter 'draft_model'.* 'drafter:rows'; set drafter.draws: true, or"),
        ({"drafter": {"use": "self_layers", "num_layers": 2}}, "'self_layers'.* 'drafter:rows'; set drafter.draws: tr"),
        ({"drafter": DRAWS, "sampler": "plugin:Plain"}, "sampler 'plugin:Plain'.* provide 'sampler:final_rows'"),
        ({"drafter": DRAWS, "engine": {"deterministic": True}}, "engine.deterministic cannot run with .* on the batch"),
    ],
)
def test_a_rule_that_cannot_be_had_is_refused(
    tiny_model: Path, tmp_path: Path, rule: str, slots: dict[str, Any], says: str
) -> None:
    write_plugin(tmp_path, WITHOUT_ROWS)
    engine = {"verification": rule, **slots.get("engine", {})}
    with pytest.raises(IncompatibleError, match=says) as error:
        resolve(fake_config(tiny_model, tmp_path, **{**slots, "engine": engine}))
    assert f"engine.verification: {rule}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_component_may_refuse_a_rule(tiny_model: Path, tmp_path: Path) -> None:
    source = """
    from law_cases import TableDrafter
    from pluglm.kernel.interfaces.component import Capabilities

    class Picky(TableDrafter):
        @classmethod
        def capabilities(cls, config):
            return Capabilities(provides=frozenset({"drafter:rows"}), refuses={"verification:block": "not proved yet"})
    """
    write_plugin(tmp_path, source)
    resolve(fake_config(tiny_model, tmp_path, drafter="plugin:Picky", engine={"verification": "token"}))
    with pytest.raises(IncompatibleError, match=r"engine\.verification: block: not proved yet"):
        resolve(fake_config(tiny_model, tmp_path, drafter="plugin:Picky", engine={"verification": "block"}))


def test_a_drafter_of_version_1_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    write_plugin(tmp_path, VERSION_1)
    with pytest.raises(PluginError, match="drafter interface 1, this pluglm speaks 2; install a version") as error:
        resolve(fake_config(tiny_model, tmp_path, drafter="plugin:Old"))
    assert "plugin:Old" in str(error.value)
    assert "\n" not in str(error.value)


def table_engine(model: Path, rule: str) -> Engine:
    return Engine.from_config(
        fake_config(
            model,
            backend={"use": "law_cases:TableBackend", "vocab_size": NUM_TOKENS},
            grammar="law_cases:LetterGrammar",
            drafter="law_cases:TableDrafter",
            engine={"verification": rule},
        )
    )


@pytest.mark.parametrize("rule", ["reproducible", "token", "block"])
def test_processed_logprobs_are_those_of_the_row_that_was_drawn_from(tiny_model: Path, rule: str) -> None:
    """Against float64, of every token, drafted or not. What cannot come is in no `top`, and nothing is infinite."""
    names = [name for name in PARAMS if name != "xtc"]
    with table_engine(tiny_model, rule) as engine:
        params = [
            params_of(name, seed, logprobs=NUM_TOKENS, logprobs_mode="processed") for name in names for seed in range(8)
        ]
        outputs = engine.generate([ids(*PROMPT) for _ in params], params)
    for number, output in enumerate(outputs):
        assert len(output.logprobs) == len(output.token_ids)
        for place, told in enumerate(output.logprobs):
            row = final_row(names[number // 8], output.token_ids[:place])
            assert told.token_id == output.token_ids[place]
            assert told.logprob == pytest.approx(math.log(row[told.token_id]), abs=1e-5)
            assert told.rank == 1 + sum(row > row[told.token_id] + 1e-9)
            assert set(told.top) == {token for token in range(NUM_TOKENS) if row[token] > 0}
            assert all(told.top[token] == pytest.approx(math.log(row[token]), abs=1e-5) for token in told.top)
    assert any(output.metrics is not None and output.metrics.num_accepted for output in outputs)


def test_raw_logprobs_are_the_models_own_under_every_rule(tiny_model: Path) -> None:
    for rule in ("reproducible", "token", "block"):
        with table_engine(tiny_model, rule) as engine:
            output = engine.generate([ids(*PROMPT)], params_of("everything", 3, logprobs=NUM_TOKENS))[0]
        for place, told in enumerate(output.logprobs):
            row = final_row("plain", output.token_ids[:place])
            assert told.logprob == pytest.approx(math.log(row[told.token_id]), abs=1e-5)
            assert set(told.top) == set(range(NUM_TOKENS))


def test_greedy_processed_logprobs_are_certain(tiny_model: Path) -> None:
    with table_engine(tiny_model, "block") as engine:
        params = params_of("penalties", 1, temperature=0.0, logprobs=2, logprobs_mode="processed")
        output = engine.generate([ids(*PROMPT)], params)[0]
    assert [(told.logprob, told.rank, told.top) for told in output.logprobs] == [
        (0.0, 1, {token: 0.0}) for token in output.token_ids
    ]
    assert "Infinity" not in json.dumps([dict(told.top) for told in output.logprobs])


def test_processed_logprobs_are_refused_where_the_sampler_has_no_final_rows(tiny_model: Path, tmp_path: Path) -> None:
    write_plugin(tmp_path, WITHOUT_ROWS)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, logprobs_mode="processed")
    with Engine.from_config(fake_config(tiny_model, tmp_path, sampler="plugin:Plain")) as engine:
        output = engine.generate([ids(1)], params)[0]
        assert output.finish_reason == "refused"
        assert "sampler 'plugin:Plain' has no final rows; leave logprobs_mode raw" in str(output.error)
        assert engine.generate([ids(1)], params.model_copy(update={"logprobs_mode": "raw"}))[0].error is None


def test_a_mode_without_logprobs_is_refused() -> None:
    with pytest.raises(RequestError, match="shows nothing without logprobs"):
        SamplingParams(logprobs_mode="processed")
