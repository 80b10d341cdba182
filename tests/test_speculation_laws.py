"""The law of the text, through scheduler, KV, masks, sampler and verification, is the target's under every rule.

The target is a table, so the law of a text is a product that float64 knows. Batches are large and mixed, so windows
have any number of drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_cases import ids, require_idle
from law_cases import (
    DELTA,
    LENGTH,
    NUM_TOKENS,
    PARAMS,
    engine_for,
    final_row,
    joint_law,
    params_of,
    problem_of,
    texts_of,
)

from pluglm import RequestOutput
from pluglm.testing.lossless_filters import PROMPT
from pluglm.testing.statistics import cell_test

RULES = ("reproducible", "token", "block")


def require_laws(model: Path, rule: str, num: int) -> None:
    with engine_for(model, rule) as engine:
        texts = texts_of(engine, list(PARAMS), num)
        require_idle(engine)
    problems = {name: problem_of(some, name) for name, some in texts.items()}
    assert not any(problems.values()), problems


@pytest.mark.parametrize("rule", RULES)
def test_texts_follow_the_law_of_the_target(tiny_model: Path, rule: str) -> None:
    require_laws(tiny_model, rule, 1_000)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_twenty_thousand_texts_follow_the_law_of_the_target(tiny_model: Path, rule: str) -> None:
    require_laws(tiny_model, rule, 20_000)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_drafter_that_lies_about_its_rows_is_lossy(tiny_model: Path, rule: str) -> None:
    """And this test can tell: the kit of drafters is what a drafter has to pass."""
    with engine_for(tiny_model, rule, "law_cases:LyingDrafter") as engine:
        texts = texts_of(engine, ["plain"], 4_000)["plain"]
    assert problem_of(texts, "plain") is not None


def test_a_drafter_that_lies_changes_nothing_under_reproducible(tiny_model: Path) -> None:
    with (
        engine_for(tiny_model, drafter="law_cases:LyingDrafter") as engine,
        engine_for(tiny_model, drafter=None) as plain,
    ):
        assert texts_of(engine, list(PARAMS), 20) == texts_of(plain, list(PARAMS), 20)


def accepted(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    return sum(one.num_accepted for one in metrics), sum(one.num_drafted for one in metrics)


def test_token_keeps_more_drafts_than_reproducible_and_block_more_than_token(tiny_model: Path) -> None:
    """Sum min(p, q) and what block adds to it, against sum p q; the batch leaves room for windows of two drafts.

    The shares are of one sample, fixed by its seeds; how many drafts a rule keeps is proved by the kit of rules.
    """
    found = {}
    for rule in RULES:
        with engine_for(tiny_model, rule, engine={"max_num_seqs": 64}) as engine:
            outputs = engine.generate([ids(*PROMPT)] * 1_500, [params_of("plain", seed) for seed in range(1_500)])
            kept, drafted = accepted(outputs)
            found[rule] = kept / drafted
    assert found["reproducible"] + 0.05 < found["token"], found
    assert found["token"] < found["block"], found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_texts_are_the_same_under_every_rule(tiny_model: Path, rule: str, batch: int) -> None:
    names = [name for name in PARAMS if name != "xtc"]
    with engine_for(tiny_model, rule, engine={"max_num_seqs": batch}) as engine:
        greedy = [params_of(name, seed, temperature=0.0) for name in names for seed in range(3)]
        outputs = engine.generate([ids(*PROMPT) for _ in greedy], greedy)
    for name, output in zip([name for name in names for _ in range(3)], outputs, strict=True):
        expected: list[int] = []
        for _ in range(LENGTH):
            expected.append(int(final_row(name, expected).argmax()))
        assert output.token_ids == expected, name


def test_a_seed_gives_the_same_text_again(tiny_model: Path) -> None:
    """Under token and block: as long as nothing else runs."""
    for rule in ("token", "block"):
        with engine_for(tiny_model, rule) as engine:
            alone = [engine.generate([ids(*PROMPT)], params_of("plain", seed))[0].token_ids for seed in range(20)]
            again = [engine.generate([ids(*PROMPT)], params_of("plain", seed))[0].token_ids for seed in range(20)]
        assert alone == again
        assert len({tuple(text) for text in alone}) > 5


def test_lanes_are_independent(tiny_model: Path) -> None:
    """Two lanes of one request: their first tokens behind the window's start have the product's law."""
    with engine_for(tiny_model, "block") as engine:
        params = [params_of("plain", seed, n=2) for seed in range(2_000)]
        outputs = engine.generate([ids(*PROMPT) for _ in params], params)
    law = joint_law("plain", 2)
    counts: Counter[tuple[int, int]] = Counter()
    for output in outputs:
        one, two = (lane.token_ids[0] * NUM_TOKENS + lane.token_ids[1] for lane in output.completions)
        counts[one, two] += 1
    cells = [(one, two) for one in range(len(law)) for two in range(len(law))]
    assert cell_test([counts[cell] for cell in cells], [law[one] * law[two] for one, two in cells], DELTA) is None
