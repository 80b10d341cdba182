"""Trees of drafts keep the target's law, exactly: all draws of a tree are enumerated, through the engine's own walk.

Coins belong to positions, so rows of one position are drawn with one coin. The intervals between all steps of their
distribution functions are enumerated; the law of texts is a sum over them, and the expected one a product of tables.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pluglm.branching.branch import Branch, MatcherBehind
from pluglm.branching.planning import BranchPlanning
from pluglm.kernel import core
from pluglm.kernel.drawing import Drawn, Window
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.lossless_boxes import Floats
from pluglm.testing.lossless_chains import Chain
from pluglm.testing.lossless_tables import filtered_chains
from pluglm.verification.judging import verify

# V: vocabulary, k: drafts of a way

Tree = list[list[int]]  # the first way, then branches
RULES = ("reproducible", "token", "block")
TOLERANCE = 1e-9
MOST_CELLS = 8_000  # of coins; the cube of larger trees is left out


class TableDrawer:
    """Draws each row of a window by the tables of a chain, with one coin for each position."""

    def __init__(self, rule: str, chain: Chain, coins: Sequence[float]) -> None:
        self.rule, self.chain, self.coins = rule, chain, coins
        self.num_rows = 0

    def draw(self, logits_RV: torch.Tensor, windows: list[Window]) -> Iterator[Any]:
        drawn: dict[int, int] = {}
        for window in windows:
            for place in range(len(window.drafts) + 1):
                text = [*window.sequence.output_token_ids, *window.drafts[:place]]
                drawn[len(drawn)] = self._token(text)
        assert len(logits_RV) == len(drawn)
        self.num_rows += len(drawn)
        return [Drawn(run.token_ids, run.num_accepted) for run in verify(self.rule, windows, drawn, {})]
        yield

    def _token(self, text: list[int]) -> int:
        row_V = row_of(self.chain, text)
        return int(np.searchsorted(row_V.cumsum(), self.coins[len(text)] * row_V.sum(), side="right"))


class NoMemory:
    """Stands for the engine's KV: what is forked and taken over is of no matter for the law."""

    def __init__(self) -> None:
        self.held_back: list[int] = []

    def changing(self, slot: str, touched: Any, change: Any) -> Iterator[Any]:
        return True
        yield


def row_of(chain: Chain, text: Sequence[int]) -> Floats:
    number = 0
    for token in text:
        number = number * chain.num_tokens + token
    return chain.target[len(text)][number]


def planning() -> BranchPlanning:
    parts: Any = SimpleNamespace(runner=None)
    unused: Any = None
    memory: Any = NoMemory()
    return BranchPlanning(parts, unused, memory, unused)


def trunk_of(tree: Tree) -> core.Sequence:
    request = core.Request(
        request_id="one", prompt_token_ids=(0,), params=SamplingParams(), seed=1, arrival_s=0.0, max_new_tokens=9
    )
    return core.Sequence(
        sequence_id=0, request=request, token_ids=[0], drafts=list(tree[0]), status=core.Status.RUNNING
    )


def windows_of(tree: Tree) -> list[Window]:
    """As the engine makes them: a branch that adds nothing has none."""
    trunk, known = trunk_of(tree), [tree[0]]
    windows = [Window(trunk, tuple(tree[0]))]
    for path in tree[1:]:
        num_shared = max(len(common(path, one)) for one in known)
        if num_shared < len(path):
            branch = Branch(len(known), trunk, path, num_shared)
            windows.append(Window(branch, tuple(branch.drafts)))
            known.append(path)
    return windows


def common(path: list[int], other: list[int]) -> list[int]:
    found = []
    for one, two in zip(path, other, strict=False):
        if one != two:
            break
        found.append(one)
    return found


def walked(tree: Tree, drawer: TableDrawer) -> tuple[list[int], int, tuple[int, ...]]:
    """The run, how many of it were drafted, and the way that was taken."""
    windows = windows_of(tree)
    logits_RV = torch.zeros((sum(len(one.drafts) + 1 for one in windows), drawer.chain.num_tokens))
    steps: Any = planning().draw(drawer, logits_RV, windows)  # type: ignore[arg-type]
    try:
        next(steps)
    except StopIteration as end:
        ((window, result),) = end.value
        return result.token_ids, result.num_accepted, window.drafts
    raise AssertionError("something was asked of the guard")


def intervals(chain: Chain, tree: Tree) -> list[list[tuple[float, float]]]:
    """For each position the (length, middle) of the intervals on which no row of the tree at it changes its draw."""
    texts = {tuple(path[:length]) for path in tree for length in range(len(path) + 1)}
    found = []
    for length in range(max(map(len, tree)) + 1):
        cuts = {0.0, 1.0}
        for text in texts:
            if len(text) == length:
                row_V = row_of(chain, text)
                cuts |= set((row_V.cumsum() / row_V.sum()).clip(0, 1).tolist())
        edges = sorted(cuts)
        found.append([(high - low, (low + high) / 2) for low, high in pairwise(edges)])
    return found


def trees(num_tokens: int, depth: int) -> Iterator[Tree]:
    """By hand: siblings at the root and below, a chain of branches, ends that a branch goes on from, twins; and random
    ones."""
    draw = random.Random(100 * num_tokens + depth)
    line = [draw.randrange(num_tokens) for _ in range(depth)]
    other = (line[0] + 1) % num_tokens
    yield [line, *([token] for token in range(num_tokens))]
    yield [[], [other], line]
    yield [[other], line, line, [other], []]
    yield [line[:1], line, [*line[:-1], (line[-1] + 1) % num_tokens]]
    for _ in range(3):
        yield [[draw.randrange(num_tokens) for _ in range(draw.randint(0, depth))] for _ in range(draw.randint(2, 4))]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [3, 4, 5])
def test_the_law_of_trees_is_the_targets(num_tokens: int, depth: int) -> None:
    """Rows plain, with top-p, min-p, penalties, a grammar, and all of them; under each rule in turn."""
    num_tried = 0
    for name, chain in filtered_chains(num_tokens, depth).items():
        if "target only" in name:
            continue
        for tree in trees(num_tokens, depth):
            cube = intervals(chain, tree)
            if np.prod([len(axis) for axis in cube], dtype=float) <= MOST_CELLS:
                require_law(RULES[num_tried % len(RULES)], chain, tree, cube)
                num_tried += 1
    assert num_tried >= 10


def require_law(rule: str, chain: Chain, tree: Tree, cube: list[list[tuple[float, float]]]) -> None:
    num_tokens, depth = chain.num_tokens, len(chain.target) - 1
    emitted = [np.zeros((num_tokens**place, num_tokens)) for place in range(depth + 1)]
    kept = np.zeros(depth + 1)
    for cell in product(*cube):
        chance = float(np.prod([size for size, _ in cell]))
        if not chance:
            continue
        run, num_accepted, way = walked(tree, TableDrawer(rule, chain, [middle for _, middle in cell]))
        assert tuple(run[:num_accepted]) == way[:num_accepted]
        number = 0
        for token in run[:-1]:
            number = number * num_tokens + token
        emitted[len(run) - 1][number, run[-1]] += chance
        kept[:num_accepted] += chance
    error = np.abs(chain.complete(emitted) - chain.joint()).max()
    assert error <= TOLERANCE, (tree, error)
    # a text keeps as many drafts as its beginning has in the tree, and no fewer
    for length in range(1, depth + 1):
        texts = {tuple(path[:length]) for path in tree if len(path) >= length}
        due = sum(
            float(np.prod([row_of(chain, text[:place])[text[place]] for place in range(length)])) for text in texts
        )
        assert kept[length - 1] == pytest.approx(due, abs=TOLERANCE), (tree, length)


def test_branches_that_no_run_comes_to_are_not_drawn_from() -> None:
    """So a step that keeps something between its rows sees those of the text alone."""
    chain = filtered_chains(3, 2)["plain"]
    tree = [[0, 1], [1, 1], [2, 0]]
    for first in range(3):
        edges = np.concatenate([[0.0], row_of(chain, []).cumsum()])
        coins = [float(edges[first] + edges[first + 1]) / 2, 0.5, 0.5]
        drawer = TableDrawer("reproducible", chain, coins)
        walked(tree, drawer)
        assert drawer.num_rows == (3 if first == 0 else 5)


class Letters:
    """A matcher of abc."""

    def __init__(self) -> None:
        self.text: list[int] = []

    @property
    def terminated(self) -> bool:
        return len(self.text) == 3

    def fill_mask(self, mask_W: Any) -> None:
        mask_W[:] = 0
        if not self.terminated:
            mask_W[0] = 1 << len(self.text)

    def accept(self, token_id: int) -> bool:
        if self.terminated or token_id != len(self.text):
            return False
        self.text.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > len(self.text):
            raise ValueError("more than there is")
        del self.text[len(self.text) - num_tokens :]

    def forced(self) -> list[int]:
        return [] if self.terminated else [len(self.text)]


@pytest.mark.parametrize(
    ("prefix", "mask", "can_go_on"), [([0], 2, True), ([0, 1], 4, True), ([0, 1, 2], -1, False), ([1], -1, False)]
)
def test_a_matcher_behind_a_prefix_leaves_the_real_one_where_it_was(
    prefix: list[int], mask: int, can_go_on: bool
) -> None:
    real = Letters()
    behind, mask_W = MatcherBehind(real, prefix), np.zeros(1, dtype=np.int32)
    for _ in range(2):
        behind.fill_mask(mask_W)
        assert mask_W[0] == mask
        assert behind.accept(len(prefix)) == can_go_on
        behind.rollback(1 if can_go_on else 0)
        assert real.text == []
