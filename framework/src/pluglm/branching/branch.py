"""One way on of a tree of drafts, as the kernel sees it: a sequence whose text is that of another, and a guess."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from typing import cast

import numpy as np
import numpy.typing as npt

from pluglm.kernel.core import Sequence, Status
from pluglm.kernel.interfaces.grammar import Matcher


class Branch(Sequence):
    """Lives for one step. The tokens that an earlier way has as well, and one more, count as known: the first row that
    is asked of it is the one behind them.

    path: all its drafts. prefix: those that count as known. It has the status of its trunk: what ends it, as a failure
    that touched it does, ends the request of both, and it is in no roster.
    """

    def __init__(self, sequence_id: int, trunk: Sequence, path: TokenIds[int], num_shared: int) -> None:
        self.trunk, self.path = trunk, list(path)
        self.prefix, rest = self.path[: num_shared + 1], self.path[num_shared + 1 :]
        matcher = trunk.matcher
        super().__init__(
            sequence_id=sequence_id,
            request=trunk.request,
            lane=trunk.lane,
            token_ids=trunk.token_ids + self.prefix,
            output_token_ids=trunk.output_token_ids + self.prefix,
            num_computed=trunk.num_computed,
            drafts=rest,
            holds_kv=True,
            matcher=None if matcher is None else cast(Matcher, MatcherBehind(matcher, self.prefix)),
            sampler_memory=trunk.sampler_memory,
        )

    @property
    def status(self) -> Status:
        return self.trunk.status

    @status.setter
    def status(self, status: Status) -> None:
        """Only the trunk's counts."""

    @property
    def num_tokens(self) -> int:
        """That it computes: the last known one of the trunk, then the path."""
        return 1 + len(self.path)


class MatcherBehind:
    """A sequence's matcher as it is behind `prefix`, for the masks of one window.

    It goes there when a mask is asked for, and the rollback that ends a window takes it back. Where the grammar has
    ended before, everything is allowed: no text goes on there, so nothing of the window is committed.
    """

    def __init__(self, matcher: Matcher, prefix: TokenIds[int]) -> None:
        self._matcher, self._prefix = matcher, prefix
        self._num_ahead: int | None = None  # accepted tokens of the prefix, None where the matcher is not ahead

    @property
    def terminated(self) -> bool:
        return self._matcher.terminated

    def fill_mask(self, mask_W: npt.NDArray[np.int32]) -> None:
        if self._num_ahead is None:
            self._num_ahead = self._go()
        if self._is_over:
            mask_W[:] = -1
        else:
            self._matcher.fill_mask(mask_W)

    def accept(self, token_id: int) -> bool:
        return not self._is_over and self._matcher.accept(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens + (self._num_ahead or 0))
        self._num_ahead = None

    def forced(self) -> list[int]:
        return [] if self._is_over else self._matcher.forced()

    @property
    def _is_over(self) -> bool:
        return self._num_ahead != len(self._prefix) or self._matcher.terminated

    def _go(self) -> int:
        for place, token_id in enumerate(self._prefix):
            if self._matcher.terminated or not self._matcher.accept(token_id):
                return place
        return len(self._prefix)
