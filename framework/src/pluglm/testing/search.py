"""The contract kit of searches: they walk only where they were shown, end in time, and give what was asked for.

Walks are played on a table of log-probabilities that depend on all tokens before; no engine and no model is needed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pluglm.kernel.errors import RequestError
from pluglm.kernel.interfaces.search import Branch, Hypothesis, Search, Walk
from pluglm.testing.check import Check, ContractViolation, expect, expect_raises, make_check
from pluglm.testing.common import common_checks
from pluglm.testing.context import make_context, small_spec

# L: lanes, V: vocabulary

Path = tuple[int, ...]
Table = Callable[[Path], torch.Tensor]  # output tokens of a lane -> logprobs_V of the next one
VOCAB_SIZE, EOS, MASKED = 9, 0, 8


@dataclass(frozen=True, slots=True)
class Subject:
    """The class under test, and the options of a request for num_results outputs."""

    cls: type[Any]
    config: Any
    options: Mapping[str, Any]
    num_results: int

    def build(self, eos: int = EOS) -> Search:
        search: Search = self.cls(
            self.config, make_context(spec=small_spec(VOCAB_SIZE), eos_token_ids=frozenset({eos}))
        )
        return search

    def start(
        self, max_tokens: int, num_results: int | None = None, *, search: Search | None = None, ignore_eos: bool = False
    ) -> Walk:
        count = self.num_results if num_results is None else num_results
        return (search or self.build()).start(copy.deepcopy(dict(self.options)), count, max_tokens, ignore_eos)


@dataclass(slots=True)
class Play:
    """A walk on a table. lanes: those of the next call; shown: the lanes of each call so far."""

    walk: Walk
    table: Table
    lanes: list[Path] = field(default_factory=lambda: [()])
    shown: list[list[Path]] = field(default_factory=list)
    branches: list[list[Branch]] = field(default_factory=list)

    def step(self) -> None:
        self.shown.append(self.lanes)
        self.branches.append(list(self.walk.advance(torch.stack([self.table(lane) for lane in self.lanes]))))
        self.lanes = [(*self.lanes[one.lane], int(one.token_id)) for one in self.branches[-1]]

    def run(self, max_calls: int) -> list[Hypothesis]:
        """To the end. ContractViolation when it is not over after max_calls."""
        while self.lanes:
            if len(self.shown) == max_calls:
                raise ContractViolation(f"expected an end within {max_calls} calls, found {len(self.lanes)} lanes more")
            self.step()
        return list(self.walk.results())


def random_table(seed: int) -> Table:
    """Log-probabilities that are normal in their logits; MASKED has none, EOS is one of nine."""

    def row(path: Path) -> torch.Tensor:
        state = seed
        for token in path:
            state = (state * 1_103_515_245 + token + 12_345) % 2_147_483_647
        logits_V = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(state)) * 2
        logits_V[MASKED] = -math.inf
        return torch.log_softmax(logits_V, dim=-1)

    return row


def only_end(path: Path) -> torch.Tensor:
    """EOS is certain."""
    return torch.where(torch.arange(VOCAB_SIZE) == EOS, 0.0, -math.inf)


def search_checks(
    cls: type[Any], config: Any = None, options: Mapping[str, Any] | None = None, num_results: int = 2
) -> Iterator[Check]:
    """Every check of a search class, for requests with these options that want num_results outputs (two or more)."""
    config = cls.Config() if config is None else config
    subject = Subject(cls, config, options or {}, num_results)
    yield from common_checks("search", cls, config, subject.build)
    for function in ALWAYS:
        yield make_check(function, subject)


def its_options_are_accepted(subject: Subject) -> None:
    for num_results in (1, subject.num_results):
        found = subject.build().check(dict(subject.options), num_results)
        expect(found is None, f"None for {dict(subject.options)} and n = {num_results}", found)


def unknown_options_are_refused_in_one_line(subject: Subject) -> None:
    key = "no_such_option_of_any_search"
    found = subject.build().check({**subject.options, key: 1}, subject.num_results)
    fine = isinstance(found, str) and key in found and "\n" not in found
    expect(fine, f"one line that names the unknown option {key}", repr(found))


def options_are_not_changed(subject: Subject) -> None:
    search, options = subject.build(), copy.deepcopy(dict(subject.options))
    search.check(options, subject.num_results)
    search.start(options, subject.num_results, 4, False)
    expect(options == dict(subject.options), f"the options as given, {dict(subject.options)}", options)


def branches_are_lanes_and_ids(subject: Subject) -> None:
    """Python ints of lanes that there are, and of tokens that have a probability."""
    for seed in range(5):
        play = Play(subject.start(5), random_table(seed))
        play.run(5)
        for lanes, branches in zip(play.shown, play.branches, strict=True):
            for one in branches:
                is_lane = isinstance(one.lane, int) and 0 <= one.lane < len(lanes)
                expect(is_lane, f"lanes 0 to {len(lanes) - 1}", one)
                is_token = isinstance(one.token_id, int) and 0 <= one.token_id < VOCAB_SIZE
                expect(is_token and one.token_id != MASKED, f"token ids below {VOCAB_SIZE}, without {MASKED}", one)


def ends_within_max_tokens(subject: Subject) -> None:
    for max_tokens in (1, 3):
        for seed in range(5):
            results = Play(subject.start(max_tokens), random_table(seed)).run(max_tokens)
            lengths = [len(one.token_ids) for one in results]
            expect(max(lengths) <= max_tokens, f"results of at most {max_tokens} tokens", lengths)


def gives_as_many_results_as_asked(subject: Subject) -> None:
    for num_results in (1, subject.num_results):
        found = Play(subject.start(4, num_results), random_table(1)).run(4)
        expect(len(found) == num_results, f"{num_results} results", found)


def results_come_best_first(subject: Subject) -> None:
    for seed in range(5):
        scores = [one.score for one in Play(subject.start(6), random_table(seed)).run(6)]
        fine = all(math.isfinite(one) for one in scores) and scores == sorted(scores, reverse=True)
        expect(fine, "finite scores, best first", scores)


def results_are_walked_paths(subject: Subject) -> None:
    """All but the last token of a result were a lane, and the last one has a probability there."""
    for seed in range(5):
        table = random_table(seed)
        play = Play(subject.start(7), table)
        for one in play.run(7):
            before, last = tuple(one.token_ids[:-1]), one.token_ids[-1]
            was_lane = len(before) < len(play.shown) and before in play.shown[len(before)]
            expect(was_lane, f"a result that continues a lane of call {len(before) + 1}", one)
            expect(bool(torch.isfinite(table(before)[last])), "a last token that has a probability", one)


def endings_are_told(subject: Subject) -> None:
    """EOS is the end and `stopped`; what did not stop has all its tokens."""
    for seed in range(10):
        for one in Play(subject.start(8), random_table(seed)).run(8):
            expect(EOS not in one.token_ids[:-1], f"no token behind EOS ({EOS})", one)
            expect(one.stopped or one.token_ids[-1] != EOS, "stopped=True for a result that ends with EOS", one)
            expect(one.stopped or len(one.token_ids) == 8, "8 tokens in a result that did not stop", one)


def ignored_eos_is_a_token_like_any_other(subject: Subject) -> None:
    """As if another id were EOS, one that has no probability anywhere."""
    for seed in range(5):
        found = Play(subject.start(9, ignore_eos=True), random_table(seed)).run(9)
        expected = Play(subject.start(9, search=subject.build(MASKED)), random_table(seed)).run(9)
        expect(found == expected, f"the results without an EOS, {expected}", found)


def walks_do_not_mix(subject: Subject) -> None:
    """Two walks of one search, in turns: each as alone."""
    for seed in range(5):
        tables = (random_table(seed), random_table(seed + 20))
        expected = [Play(subject.start(10), table).run(10) for table in tables]
        search = subject.build()
        plays = [Play(subject.start(10, search=search), table) for table in tables]
        for _ in range(10):
            for play in plays:
                if play.lanes:
                    play.step()
        found = [list(play.walk.results()) for play in plays]
        expect(found == expected, f"the results of each alone, {expected}", found)


def same_logprobs_same_results(subject: Subject) -> None:
    for seed in range(5):
        first, second = (Play(subject.start(11), random_table(seed)).run(11) for _ in range(2))
        expect(first == second, f"the same results from another search of the same config, {first}", second)


def the_only_end_is_the_end(subject: Subject) -> None:
    play = Play(subject.start(12, 1), only_end)
    play.step()
    expect(not play.lanes, "no lane to go on with where EOS alone has a probability", play.lanes)
    best = play.walk.results()[0].token_ids
    expect(best == (EOS,), f"{(EOS,)} as the best result", best)


def too_few_results_are_refused(subject: Subject) -> None:
    play = Play(subject.start(1), only_end)
    with expect_raises(RequestError, f"for {subject.num_results} results where one output has a probability"):
        play.run(1)


ALWAYS = (
    its_options_are_accepted,
    unknown_options_are_refused_in_one_line,
    options_are_not_changed,
    branches_are_lanes_and_ids,
    ends_within_max_tokens,
    gives_as_many_results_as_asked,
    results_come_best_first,
    results_are_walked_paths,
    endings_are_told,
    ignored_eos_is_a_token_like_any_other,
    walks_do_not_mix,
    same_logprobs_same_results,
    the_only_end_is_the_end,
    too_few_results_are_refused,
)
