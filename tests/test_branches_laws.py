"""With trees of drafts the law of the text is the target's under every rule; the target is a table, known to float64.

The drafter proposes trees and drawn lines with their rows in turn, so under `token` and `block` both are verified.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from branch_cases import taken
from engine_cases import require_idle
from law_cases import PARAMS, engine_for, problem_of, texts_of

from pluglm import Engine

RULES = ("reproducible", "token", "block")
LIMITS = {"max_num_seqs": 64, "max_step_tokens": 64 * 12}


def likely(model: Path, rule: str) -> Engine:
    return engine_for(model, rule, "branch_cases:LikelyDrafter", engine=LIMITS)


def require_laws(model: Path, rule: str, num: int) -> None:
    with likely(model, rule) as engine:
        texts = texts_of(engine, list(PARAMS), num)
        require_idle(engine)
        assert taken(engine) > num
    problems = {name: problem_of(some, name) for name, some in texts.items()}
    assert not any(problems.values()), problems


@pytest.mark.parametrize("rule", RULES)
def test_texts_follow_the_law_of_the_target(tiny_model: Path, rule: str) -> None:
    require_laws(tiny_model, rule, 500)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_twenty_thousand_texts_follow_the_law_of_the_target(tiny_model: Path, rule: str) -> None:
    require_laws(tiny_model, rule, 20_000)


def test_texts_of_seeds_are_those_without_branches(tiny_model: Path) -> None:
    with likely(tiny_model, "reproducible") as engine, engine_for(tiny_model, drafter=None) as plain:
        assert texts_of(engine, list(PARAMS), 50) == texts_of(plain, list(PARAMS), 50)
        assert taken(engine) > 50
