"""What is measured, in which order, and how often. Asks contenders; starts none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from peers.driving import WorkerError

NEW_TOKENS = 32
Ask = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One request. heavy: takes seconds of prefill, so it runs in half the rounds and warms up with few tokens."""

    name: str
    request: Mapping[str, Any]
    heavy: bool = False

    @property
    def batch(self) -> int:
        return int(self.request.get("batch", 1))

    @property
    def tags(self) -> list[str]:
        return [self.name, *(part for part in self.name.split("_") if not part.isdigit())]

    def warm_up(self) -> dict[str, Any]:
        short = {"context": 16, "new_tokens": 4} if self.heavy else {}
        return {**self.request, **short, "seed": 0}


def _decode(batch: int, context: int, heavy: bool = False) -> Case:
    request = {"run": "decode", "batch": batch, "context": context, "new_tokens": NEW_TOKENS}
    return Case(f"batch{batch}_context{context}", request, heavy)


CASES = (
    _decode(1, 64),
    _decode(1, 512),
    _decode(1, 4096, heavy=True),
    _decode(8, 512, heavy=True),
    _decode(32, 512, heavy=True),
    Case("prefill_1024", {"run": "prefill", "tokens": 1024}),
)


def chosen(tags: Collection[str]) -> list[Case]:
    """The cases with any of the tags; all for none."""
    return [case for case in CASES if not tags or not set(tags).isdisjoint(case.tags)]


@dataclass
class Samples:
    """tokens_per_s[case][contender]: one number a round. failed[contender]: why it left; what it gave before stays."""

    tokens_per_s: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def interleave(
    cases: Collection[Case],
    contenders: Mapping[str, Ask],
    batches: Mapping[str, Collection[int]],
    rounds: int,
    note: Callable[[str], None],
    begin: Callable[[Case], None] = lambda case: None,
) -> Samples:
    """Each round of a case asks every contender once, in order, so that a busy machine slows all of them alike.

    batches: the batch sizes a contender can do; it is left out of other cases. One that raises WorkerError is left out
    from then on, and the rest go on. note: told of each round of a case, one line. begin: called before each case.
    """
    samples = Samples()
    for case in cases:
        begin(case)
        able = [name for name in contenders if case.batch in batches[name]]
        speeds = samples.tokens_per_s.setdefault(case.name, {})
        for number in range(1 + (max(1, rounds // 2) if case.heavy else rounds)):
            for name in able:
                if name in samples.failed:
                    continue
                request = {**case.request, "seed": number} if number else case.warm_up()
                try:
                    reply = contenders[name](request)
                except WorkerError as error:
                    samples.failed[name] = f"{case.name}: {error}"
                    continue
                if number:
                    speeds.setdefault(name, []).append(reply["tokens"] / reply["seconds"])
            if number:
                last = (f"{name} {values[-1]:.1f}" for name, values in speeds.items() if name not in samples.failed)
                note(f"{case.name}, round {number}: {', '.join(last)}")
    return samples
