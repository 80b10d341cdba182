"""Window after window: which coins may be keyed by position alone, and which need the start of their window as well.

`token` looks at nothing behind the end of its run, so coins of later positions are as good as new for the next window.
`block` does look at them: under it a coin or a draft that served once may not serve again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pluglm.testing.lossless_boxes import Floats, Ints
from pluglm.testing.lossless_draws import uniforms
from pluglm.testing.statistics import cell_test
from pluglm.verification import Verdict, Windows, block, reproducible, token

# N: texts, n: texts whose window begins at one place, V: vocabulary

Rule = Callable[[Windows], Verdict]
NUM_TEXTS, LENGTH, NUM_DRAFTS, WIDTH = 150_000, 4, 2, 3
DELTA = 1e-7  # for each of six right cases, so that together they fail less than once in a million seeds
NO_TOKEN = WIDTH  # the context of the first position


def tables() -> tuple[Floats, Floats]:
    """Rows of target and drafter by the token before, [V + 1, V]."""
    random = np.random.default_rng(0)
    return random.dirichlet(np.ones(WIDTH), WIDTH + 1), random.dirichlet(np.ones(WIDTH), WIDTH + 1)


def pick(rows_NV: Floats, coins_N: Floats) -> Ints:
    ids_N: Ints = (rows_NV.cumsum(1) <= coins_N[:, None]).sum(1).clip(max=WIDTH - 1)
    return ids_N


def coins_by(random: np.random.Generator, is_by_start: bool) -> Floats:
    """[start, N, position]: the same for every start unless they are keyed by it too."""
    some = uniforms(random, LENGTH if is_by_start else 1, NUM_TEXTS, LENGTH + NUM_DRAFTS)
    return np.broadcast_to(some, (LENGTH, *some.shape[1:]))


def judge(rule: Rule, contexts: list[Ints], coins: Floats, recover_n: Floats) -> tuple[Ints, Ints]:
    """How many drafts are kept, and the token behind them. contexts: the token before the window, then the drafts."""
    target, draft = (np.stack([table[one] for one in contexts], 1).astype(np.float32) for table in tables())
    verdict = rule(
        Windows(
            num_drafts=[NUM_DRAFTS] * len(coins),
            drafts_D=torch.from_numpy(np.stack(contexts[1:], 1).flatten()),
            target_TV=torch.from_numpy(target).flatten(0, 1),
            proposal_DV=torch.from_numpy(draft[:, :-1].copy()).flatten(0, 1),
            coins_D=torch.from_numpy(coins.flatten()),
            recover_S=torch.from_numpy(recover_n),
        )
    )
    return verdict.num_kept_S.numpy(), verdict.last_S.numpy()


def draw_texts(rule: Rule, accept_by_start: bool, propose_by_start: bool) -> Ints:
    """Token ids [N, LENGTH] and more, said in windows one after another."""
    random = np.random.Generator(np.random.Philox(17))
    accept, propose = coins_by(random, accept_by_start), coins_by(random, propose_by_start)
    recover = uniforms(random, NUM_TEXTS, LENGTH + NUM_DRAFTS)  # a position is recovered once: the run ends there
    texts, length_N = np.full((NUM_TEXTS, LENGTH + NUM_DRAFTS), NO_TOKEN), np.zeros(NUM_TEXTS, dtype=np.int64)
    for start in range(LENGTH):
        chosen = np.flatnonzero(length_N == start)
        contexts = [texts[chosen, start - 1] if start else np.full(len(chosen), NO_TOKEN)]
        for place in range(start, start + NUM_DRAFTS):
            contexts.append(pick(tables()[1][contexts[-1]], propose[start, chosen, place]))
        coins = accept[start, chosen, start : start + NUM_DRAFTS]
        kept_n, _ = judge(rule, contexts, coins, np.full(len(chosen), 0.5))
        _, last_n = judge(rule, contexts, coins, recover[chosen, start + kept_n])
        for place in range(NUM_DRAFTS + 1):
            draft_n = contexts[min(place + 1, NUM_DRAFTS)]
            texts[chosen, start + place] = np.where(place < kept_n, draft_n, last_n)
        length_N[chosen] += kept_n + 1
    return texts


def problem_of(rule: Rule, accept_by_start: bool, propose_by_start: bool) -> str | None:
    """What the cell test finds in the joint law of LENGTH tokens."""
    texts, target = draw_texts(rule, accept_by_start, propose_by_start), tables()[0]
    cells = np.ravel_multi_index(tuple(texts[:, :LENGTH].T), (WIDTH,) * LENGTH)
    law = target[NO_TOKEN]
    for _ in range(LENGTH - 1):
        law = (law.reshape(-1, WIDTH)[..., None] * target[:WIDTH]).reshape(-1)
    return cell_test(np.bincount(cells, minlength=len(law)).tolist(), law.tolist(), DELTA)


@pytest.mark.parametrize("propose_by_start", [True, False])
@pytest.mark.parametrize("accept_by_start", [True, False])
def test_token_wise_windows_may_share_coins_of_a_position(accept_by_start: bool, propose_by_start: bool) -> None:
    assert problem_of(token, accept_by_start, propose_by_start) is None


def test_windows_of_sample_and_compare_may_share_coins_of_a_position() -> None:
    assert problem_of(reproducible, False, False) is None


def test_block_windows_need_new_coins_and_new_drafts() -> None:
    assert problem_of(block, True, True) is None
    assert problem_of(block, False, True) is not None
    assert problem_of(block, True, False) is not None
