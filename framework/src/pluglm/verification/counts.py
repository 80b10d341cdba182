"""What became of drafts, window by window: counts that add up, and the rates that follow. Knows no rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Self

Outcome = tuple[int, int, int]  # of one window: drafts verified, drafts kept, tokens committed


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCounts:
    """Of one request, or of several: `sum(counts, SpeculationCounts())`.

    A window is one step of the target that gave one sequence tokens, with drafts or without: the step that ends the
    prompt is one, a step that computes a part of it is not, and the n sequences of a request have windows of their own.
    num_tokens: what the windows gave, the token behind the kept drafts included.

    drafted_by_position, accepted_by_position: at place i, how many windows verified more than i drafts, and kept more
    than i. A draft behind the token that ended the request was verified and not kept.
    """

    num_windows: int = 0
    num_tokens: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @classmethod
    def of(cls, sequences: Iterable[Mapping[Outcome, int]]) -> Self:
        """sequences: of each one, how many of its windows came out in which way."""
        windows = Counter[Outcome]()
        for outcomes in sequences:
            windows.update(outcomes)
        most = max((drafted for drafted, _, _ in windows), default=0)
        return cls(
            num_windows=windows.total(),
            num_tokens=sum(tokens * count for (_, _, tokens), count in windows.items()),
            drafted_by_position=_reaching(((drafted, count) for (drafted, _, _), count in windows.items()), most),
            accepted_by_position=_reaching(((kept, count) for (_, kept, _), count in windows.items()), most),
        )

    @property
    def num_drafted(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted_by_position)

    @property
    def num_accepted(self) -> int:
        """Drafts that were kept."""
        return sum(self.accepted_by_position)

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens a window, the one behind the kept drafts included; 1 without drafts, None without windows."""
        return self.num_tokens / self.num_windows if self.num_windows else None

    @property
    def accepted_per_step(self) -> float | None:
        """Mean kept drafts a window, so the token behind them is not included; None without windows."""
        return self.num_accepted / self.num_windows if self.num_windows else None

    @property
    def acceptance_by_position(self) -> tuple[float | None, ...]:
        """At place i, the share of drafts there that were kept; a draft is kept only if all before it are.

        None where none was drafted.
        """
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return tuple(accepted / drafted if drafted else None for accepted, drafted in pairs)

    def to_json(self) -> dict[str, Any]:
        """Counts and rates, as JSON data."""
        return {
            "num_windows": self.num_windows,
            "num_tokens": self.num_tokens,
            "tokens_per_step": self.tokens_per_step,
            "accepted_per_step": self.accepted_per_step,
            "drafted_by_position": list(self.drafted_by_position),
            "accepted_by_position": list(self.accepted_by_position),
            "acceptance_by_position": list(self.acceptance_by_position),
        }

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        return SpeculationCounts(
            num_windows=self.num_windows + other.num_windows,
            num_tokens=self.num_tokens + other.num_tokens,
            drafted_by_position=_added(self.drafted_by_position, other.drafted_by_position),
            accepted_by_position=_added(self.accepted_by_position, other.accepted_by_position),
        )


def _reaching(lengths: Iterable[tuple[int, int]], most: int) -> tuple[int, ...]:
    """(length, how often) -> how often it was longer than i, for i below `most`."""
    known = list(lengths)
    return tuple(sum(count for length, count in known if length > place) for place in range(most))


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(one, other, fillvalue=0)))
