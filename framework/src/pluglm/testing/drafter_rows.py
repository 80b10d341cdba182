"""The part of the drafter kit about rows: that drafts are really drawn from them, and with coins of their own.

A rule that is lossless for an honest row is lossy for another, and nothing in a run can tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pluglm.kernel.interfaces.drafter import Drafter, Proposal
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import Check, ContractViolation, expect, make_check
from pluglm.testing.drafter_requests import draft_request
from pluglm.testing.statistics import cell_test
from pluglm.verification.checking import problem_of_rows
from pluglm.verification.randomness import Purpose, uniform, window_uniforms

# N: proposals, V: the target's logits

Make = Callable[[], Drafter]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
CONTEXTS = ([3], [1, 2], [5, 6, 7], [4, 4, 4, 4], [9, 8, 7, 9, 8])
NUM_PROPOSALS, BATCH = 20_000, 32
NUM_GROUPS = 8  # of tokens and of coins, where two of them are tested together
LEAST = 250  # proposals in a test
DELTA = 1e-9  # of one test; there are about 300, so a sound drafter fails the kit less than once in a million runs
WARM = SamplingParams(temperature=0.9)


def row_checks(make: Make, vocab_size: int, num_proposals: int = NUM_PROPOSALS) -> Iterator[Check]:
    """Every check of a drafter of the tag ROWS. make: a fresh one for a target of so many logits.

    num_proposals: for each of five texts; with fewer, smaller lies pass.
    """
    samples = _Samples(make, num_proposals)
    for function in (rows_come_with_drafts, rows_are_probabilities, proposing_twice_gives_equal_rows):
        yield make_check(function, make, vocab_size)
    for law in (drafts_follow_their_rows, second_drafts_follow_theirs, coins_of_verification_are_not_used):
        yield make_check(law, samples)
    yield make_check(the_next_window_has_fresh_coins, samples)


def rows_come_with_drafts(make: Make, vocab_size: int) -> None:
    """For every request that is sampled; and no request is refused a row because of its length."""
    for text, proposal in _proposals(make, 3):
        expect(not proposal.token_ids or proposal.rows_kV is not None, f"rows with the drafts of {text}", "None")


def rows_are_probabilities(make: Make, vocab_size: int) -> None:
    """float32 [k, V] that are positive where a draft was drawn, none negative, of sum 1."""
    for text, proposal in _proposals(make, 3):
        problem = problem_of_rows(proposal.rows_kV, proposal.token_ids, vocab_size, "cpu")
        expect(problem is None, f"rows that the drafts of {text} can be drawn from", f"a drafter that {problem}")


def proposing_twice_gives_equal_rows(make: Make, vocab_size: int) -> None:
    drafter = make()
    requests = [draft_request(text, sequence_id=place, params=WARM) for place, text in enumerate(CONTEXTS)]
    for text, one, two in zip(CONTEXTS, drafter.propose(requests), drafter.propose(requests), strict=True):
        same = one.token_ids == two.token_ids and _rows_are_close(one.rows_kV, two.rows_kV)
        expect(same, f"the same drafts and rows for {text} when asked again", "others")


def _proposals(make: Make, max_tokens: int) -> Iterator[tuple[Sequence[int], Proposal]]:
    """Some texts with what is proposed for them, under several seeds and temperatures."""
    for temperature in (1e-3, 0.7, 2.0):
        params = SamplingParams(temperature=temperature)
        for seed in range(4):
            texts = enumerate(CONTEXTS)
            requests = [
                draft_request(text, sequence_id=place, max_tokens=max_tokens, params=params, seed=seed)
                for place, text in texts
            ]
            yield from zip(CONTEXTS, make().propose(requests), strict=True)


def _rows_are_close(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.shape == two.shape and torch.allclose(one, two, atol=1e-6)


class Drawn(NamedTuple):
    """Of the proposals with so many drafts: their seeds [N], the last of these drafts [N] and its rows [N, V]."""

    seeds: Ints
    ids: Ints
    rows: Floats


class _Samples:
    """Many proposals for each context, each under a seed of its own, made when they are first asked for."""

    def __init__(self, make: Make, num_proposals: int) -> None:
        self._make, self._num_proposals = make, num_proposals
        self._found: dict[tuple[int, ...], list[Proposal]] = {}

    def of(self, text: Sequence[int], num_drafts: int) -> Drawn:
        """ContractViolation when there are too few proposals of that many drafts to judge them."""
        if tuple(text) not in self._found:
            self._found[tuple(text)] = list(self._draw(text))
        proposals = enumerate(self._found[tuple(text)])
        long = [(seed, one) for seed, one in proposals if len(one.token_ids) >= num_drafts and one.rows_kV is not None]
        if len(long) < LEAST:
            what = f"{LEAST} of {self._num_proposals} proposals for {list(text)} with {num_drafts} drafts and rows"
            raise ContractViolation(f"expected at least {what}, found {len(long)}")
        place = num_drafts - 1
        rows = torch.stack([one.rows_kV[place] for _, one in long if one.rows_kV is not None])
        return Drawn(
            np.array([seed for seed, _ in long]),
            np.array([one.token_ids[place] for _, one in long]),
            rows.double().numpy(),
        )

    def _draw(self, text: Sequence[int]) -> Iterator[Proposal]:
        """Two drafts at most. All of the text but its first token is output, as far as coins know."""
        drafter = self._make()
        for first in range(0, self._num_proposals, BATCH):
            requests = [
                draft_request(
                    text,
                    sequence_id=seed - first,
                    max_tokens=2,
                    params=WARM,
                    seed=seed,
                    prompt_token_ids=tuple(text[:1]),
                )
                for seed in range(first, first + BATCH)
            ]
            yield from drafter.propose(requests)
            for request in requests:
                drafter.release(request.sequence_id)


def drafts_follow_their_rows(samples: _Samples) -> None:
    """Also when only some are proposed: which ones must not depend on what was drawn."""
    for text in CONTEXTS:
        _, ids, rows = samples.of(text, 1)
        _expect_law(ids, rows, f"first drafts of {text}")


def second_drafts_follow_theirs(samples: _Samples) -> None:
    """Given the first ones: a coin that served twice shows here."""
    for text in CONTEXTS:
        first, second = samples.of(text, 1), samples.of(text, 2)
        before = dict(zip(first.seeds.tolist(), first.ids.tolist(), strict=True))
        groups = np.array([before[seed] % NUM_GROUPS for seed in second.seeds.tolist()])
        _expect_laws(second, groups, f"second drafts of {text} behind some first ones")


def coins_of_verification_are_not_used(samples: _Samples) -> None:
    """What the kernel draws with at the same position says nothing of the draft."""
    for text in CONTEXTS[:2]:
        drawn, start = samples.of(text, 1), len(text) - 1
        if _problem(drawn.ids, drawn.rows) is not None:
            continue  # which is the finding of drafts_follow_their_rows
        seeds = drawn.seeds.tolist()
        coins = {
            "draw": [uniform(seed, 0, start) for seed in seeds],
            "accept": [window_uniforms(seed, 0, start, 1, Purpose.ACCEPT)[0] for seed in seeds],
            "recover": [uniform(seed, 0, start, Purpose.RECOVER) for seed in seeds],
        }
        for name, some in coins.items():
            groups = (np.array(some) * NUM_GROUPS).astype(np.int64)
            _expect_laws(drawn, groups, f"drafts of {text} under a share of the coins to {name}")


def the_next_window_has_fresh_coins(samples: _Samples) -> None:
    """The second draft of a window, and the first of the window that begins at its position, are independent."""
    text, longer = CONTEXTS[1], [*CONTEXTS[1], 6]
    before, drawn = samples.of(text, 2), samples.of(longer, 1)
    if _problem(drawn.ids, drawn.rows) is not None:
        return
    seconds = dict(zip(before.seeds.tolist(), before.ids.tolist(), strict=True))
    have = np.array([seed in seconds for seed in drawn.seeds.tolist()])
    later = Drawn(drawn.seeds[have], drawn.ids[have], drawn.rows[have])
    groups = np.array([seconds[seed] % NUM_GROUPS for seed in later.seeds.tolist()])
    _expect_laws(later, groups, "drafts at a position that the window before had drafted too")


def _expect_laws(drawn: Drawn, groups: Ints, what: str) -> None:
    """Of each group by itself, if it is large enough."""
    for group in range(NUM_GROUPS):
        mine = groups == group
        if mine.sum() >= LEAST:
            _expect_law(drawn.ids[mine], drawn.rows[mine], what)


def _expect_law(ids: Ints, rows: Floats, what: str) -> None:
    problem = _problem(ids, rows)
    expect(problem is None, f"{what} to be drawn from their rows", problem)


def _problem(ids: Ints, rows: Floats) -> str | None:
    """The cell test holds for draws from different rows too, with their mean in the place of the row: Hoeffding (1963)
    bounds a sum of independent trials by that of trials of their mean chance."""
    counts = np.bincount(ids, minlength=rows.shape[1])
    return cell_test(counts.tolist(), rows.mean(0).tolist(), DELTA)
