"""The kit of searches is tested: a plain search passes, and for every check one broken search fails only that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.kernel.errors import RequestError
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.search import Branch, Hypothesis
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.search import search_checks

OPTIONS = {"keep": [3]}  # a list, which a careless search could change


class PlainWalk:
    """The most likely `keep` continuations of all lanes go on, and those that end are hypotheses."""

    def __init__(self, keep: int, num_results: int, max_tokens: int, eos: frozenset[int]) -> None:
        self.keep, self.num_results, self.max_tokens, self.eos = keep, num_results, max_tokens, eos
        self.lanes: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        self.found: list[Hypothesis] = []
        self.num_calls = 0

    def advance(self, logprobs_LV: torch.Tensor) -> list[Branch]:
        self.num_calls += 1
        options = [
            (self.lanes[lane][0] + logprob, lane, token)
            for lane, row in enumerate(logprobs_LV.tolist())
            for token, logprob in enumerate(row)
            if logprob > float("-inf")
        ]
        lanes, branches = [], []
        for score, lane, token in sorted(options, key=lambda one: -one[0]):
            path = (*self.lanes[lane][1], token)
            if token in self.eos or len(path) == self.max_tokens:
                self.found.append(Hypothesis(token_ids=path, score=score, stopped=token in self.eos))
            elif len(lanes) < self.keep:
                lanes.append((score, path))
                branches.append(Branch(lane, token))
        self.lanes = lanes
        return branches

    def results(self) -> list[Hypothesis]:
        if len(self.found) < self.num_results:
            raise RequestError("so many do not exist")
        return sorted(self.found, key=lambda one: -one.score)[: self.num_results]


class PlainSearch:
    """Methods and class attributes are what the fixtures break."""

    interface_version = 1
    Config = ComponentConfig
    walk: type[PlainWalk] = PlainWalk

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.eos_token_ids = context.eos_token_ids
        self.num_started = 0

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def check(self, options: Mapping[str, Any], num_results: int) -> str | None:
        unknown = [key for key in options if key != "keep"]
        return f"option {unknown[0]} is unknown" if unknown else None

    def start(self, options: Mapping[str, Any], num_results: int, max_tokens: int, ignore_eos: bool) -> PlainWalk:
        self.num_started += 1
        eos = frozenset() if ignore_eos else self.eos_token_ids
        return self.walk(options["keep"][0], num_results, max_tokens, eos)


def with_walk(walk: type[PlainWalk]) -> type[PlainSearch]:
    return type("Broken", (PlainSearch,), {"walk": walk})


class RefusesAll(PlainSearch):
    def check(self, options: Mapping[str, Any], num_results: int) -> str | None:
        return super().check(options, num_results) or "not today"


class IgnoresUnknownOptions(PlainSearch):
    def check(self, options: Mapping[str, Any], num_results: int) -> str | None:
        return None


class AppendsToOptions(PlainSearch):
    def start(self, options: Mapping[str, Any], *arguments: Any) -> PlainWalk:
        walk = super().start(options, *arguments)
        options["keep"].append(1)
        return walk


class TensorTokens(PlainWalk):
    def advance(self, logprobs_LV: torch.Tensor) -> list[Branch]:
        found = super().advance(logprobs_LV)
        return [Branch(one.lane, torch.tensor(one.token_id)) for one in found]  # type: ignore[arg-type]


class OneCallMore(PlainWalk):
    """Begins with the prompt once more, so that a walk of three tokens takes four calls."""

    def advance(self, logprobs_LV: torch.Tensor) -> list[Branch]:
        found = super().advance(logprobs_LV)
        return [Branch(0, 1)] if self.num_calls == self.max_tokens == 3 else found


class OneResultMore(PlainWalk):
    def results(self) -> list[Hypothesis]:
        found = super().results()
        return [*found, replace(found[-1], score=found[-1].score - 1)]


class WorstFirst(PlainWalk):
    def results(self) -> list[Hypothesis]:
        return super().results()[::-1]


class ForgetsItsBeginning(PlainWalk):
    """Long results begin with another token than the lane that they were."""

    def results(self) -> list[Hypothesis]:
        return [self.changed(one) for one in super().results()]

    def changed(self, one: Hypothesis) -> Hypothesis:
        first = one.token_ids[0] % 7 + 1  # neither EOS nor the masked id
        return replace(one, token_ids=(first, *one.token_ids[1:])) if len(one.token_ids) > 2 else one


class NeverSaysStopped(PlainWalk):
    def results(self) -> list[Hypothesis]:
        return [replace(one, stopped=False) for one in super().results()]


class AlwaysEndsAtEos(PlainSearch):
    def start(self, options: Mapping[str, Any], *arguments: Any) -> PlainWalk:
        return super().start(options, *arguments[:-1], False)


class NarrowerForTheSecond(PlainSearch):
    def start(self, options: Mapping[str, Any], *arguments: Any) -> PlainWalk:
        walk = super().start(options, *arguments)
        walk.keep -= 2 * (self.num_started == 2)
        return walk


class NarrowerEverySecondTime(PlainSearch):
    """Counts all objects of the class, and shows it in walks of eleven tokens."""

    objects: list[int] = []  # noqa: RUF012 - the shared state is what is wrong with it

    def start(self, options: Mapping[str, Any], *arguments: Any) -> PlainWalk:
        walk = super().start(options, *arguments)
        if walk.max_tokens == 11:
            self.objects.append(1)
            walk.keep -= 2 * (len(self.objects) % 2)
        return walk


class NeverWithoutALane(PlainWalk):
    def advance(self, logprobs_LV: torch.Tensor) -> list[Branch]:
        found = super().advance(logprobs_LV)
        return found or ([Branch(0, 0)] if self.num_calls < self.max_tokens else [])


class GivesWhatItHas(PlainWalk):
    def results(self) -> list[Hypothesis]:
        return sorted(self.found, key=lambda one: -one.score)[: self.num_results]


BROKEN: dict[str, type[PlainSearch]] = {
    "its_options_are_accepted": RefusesAll,
    "unknown_options_are_refused_in_one_line": IgnoresUnknownOptions,
    "options_are_not_changed": AppendsToOptions,
    "branches_are_lanes_and_ids": with_walk(TensorTokens),
    "ends_within_max_tokens": with_walk(OneCallMore),
    "gives_as_many_results_as_asked": with_walk(OneResultMore),
    "results_come_best_first": with_walk(WorstFirst),
    "results_are_walked_paths": with_walk(ForgetsItsBeginning),
    "endings_are_told": with_walk(NeverSaysStopped),
    "ignored_eos_is_a_token_like_any_other": AlwaysEndsAtEos,
    "walks_do_not_mix": NarrowerForTheSecond,
    "same_logprobs_same_results": NarrowerEverySecondTime,
    "the_only_end_is_the_end": with_walk(NeverWithoutALane),
    "too_few_results_are_refused": with_walk(GivesWhatItHas),
}


def test_a_plain_search_passes() -> None:
    report = run_checks(search_checks(PlainSearch, options=OPTIONS))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in search_checks(PlainSearch, options=OPTIONS)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_search_fails_exactly_its_check(name: str) -> None:
    report = run_checks(search_checks(BROKEN[name], options=OPTIONS))
    assert report.failed == (name,), str(report)
