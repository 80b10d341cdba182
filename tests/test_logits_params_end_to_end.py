"""What requests ask of the logits shows in their tokens, on the reference backend, with a drafter as without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import ids, real_config, require_idle

from pluglm import Engine, SamplingParams

PROMPTS = ([9, 41, 77, 12, 30, 5, 18], [23], [60, 61, 62, 60, 61, 62, 60, 61], [7, 7, 7, 7])
ALLOWED = (5, 7, 9, 60, 61, 62)
KINDS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": ALLOWED},
    "bad_words_ids": {"bad_words_ids": ((7,), (60, 61), (61, 62, 60)), "temperature": 0.3},
    "logit_bias": {"logit_bias": {5: 4.0, 60: 4.0, 61: 4.0}},
    "dry": {"dry_multiplier": 1.0, "dry_allowed_length": 1, "allowed_token_ids": ALLOWED, "dry_breaker_ids": (9,)},
    "greedy dry": {"dry_multiplier": 1.0, "temperature": 0, "allowed_token_ids": ALLOWED},
    "dynamic temperature": {"dynatemp_low": 0.3, "dynatemp_high": 1.5, "dynatemp_exponent": 2.0},
    "truncations": {"top_n_sigma": 2.0, "typical_p": 0.9, "epsilon_cutoff": 0.001, "eta_cutoff": 0.001},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "temperature": 0.5},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.4},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.4},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (5, 60), "logit_bias": {5: 6.0, 60: 6.0}},
}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    with Engine.from_config(real_config(tiny_model)) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafted(tiny_model: Path) -> Iterator[Engine]:
    drafter = {"use": "draft_model", "model": str(tiny_model), "num_tokens": 3}
    with Engine.from_config(real_config(tiny_model, drafter=drafter)) as engine:
        yield engine


def tokens(engine: Engine, **params: Any) -> list[list[int]]:
    chosen = SamplingParams(**{"max_tokens": 16, "seed": 3, "ignore_eos": True, **params})
    outputs = engine.generate([ids(*prompt) for prompt in PROMPTS], chosen)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_see_what_every_position_sees(plain: Engine, drafted: Engine, kind: str) -> None:
    """vllm #42744, vllm #38202, sglang #33643: min_tokens, bias or penalties reached the last row of a window alone."""
    assert tokens(drafted, **KINDS[kind]) == tokens(plain, **KINDS[kind])
    assert tokens(plain, **KINDS[kind]) != tokens(plain)
    require_idle(drafted)


def test_only_allowed_tokens_come(plain: Engine) -> None:
    for temperature in (0.0, 1.0, 5.0):
        assert {one for out in tokens(plain, allowed_token_ids=ALLOWED, temperature=temperature) for one in out} <= {
            *ALLOWED
        }


def test_a_bad_word_is_replaced_at_its_last_token(plain: Engine) -> None:
    for prompt, text in zip(PROMPTS, tokens(plain, temperature=0), strict=True):
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, bad_words_ids=(tuple(text[3:6]),))
        found = list(plain.generate(ids(*prompt), params)[0].token_ids)
        first = min(end for end in range(3, 17) if text[end - 3 : end] == text[3:6])
        assert found[: first - 1] == text[: first - 1]
        assert found[first - 1] != text[first - 1]
        assert all(found[end - 3 : end] != text[3:6] for end in range(3, 17))


def test_bias_decides_a_greedy_output_and_dry_ends_the_loop(plain: Engine) -> None:
    loop = {"temperature": 0, "logit_bias": {5: 60.0}}
    assert tokens(plain, **loop) == [[5] * 16] * 4
    for found in tokens(plain, **loop, dry_multiplier=1.0, dry_base=2.0):
        assert 5 < found.index(next(one for one in found if one != 5)) < 12  # 2 ** (run - 2) passes 60 at a run of 8


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_eos_comes_behind_min_tokens_at_once_when_it_is_wanted(plain: Engine, num_tokens: int) -> None:
    eos = min(plain._core.parts.eos_token_ids)
    params = {"logit_bias": {eos: 1e6}, "ignore_eos": False, "temperature": 0}
    assert all(found[0] == eos for found in tokens(plain, **params))
    for found in tokens(plain, **params, min_tokens=num_tokens):
        assert found.index(eos) == num_tokens == len(found) - 1
