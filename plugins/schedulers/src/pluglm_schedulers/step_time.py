"""How long steps take: a line through the times and token counts of past steps. Knows views, never a clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pluglm.kernel.core import RequestView, StepView

FADE = 0.98  # of every older step's weight with each new one: about the last 50 count


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step of n tokens takes step_s + n * token_s seconds."""

    step_s: float
    token_s: float


class StepTimes:
    """Least squares over the steps seen, the older ones fading; with one token count so far, all is the step's.

    A step counts when it is known what it did: the next view follows at once, and nobody left in between. Where a
    sequence started that may have adopted cached KV, the tokens computed are unknown, and the step does not count.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float, dict[int, RequestView]] | None = None
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def planning(self, view: StepView) -> None:
        """Called with the view of every step; again with the same one it changes nothing."""
        now = {one.sequence_id: one for one in (*view.running, *view.waiting)}
        last, self._last = self._last, (view.step, view.now_s, now)
        if last is None or view.step != last[0] + 1:
            return
        num_tokens = 0
        for sequence_id, before in last[2].items():
            after = now.get(sequence_id)
            if after is None:
                return
            gained = after.num_computed - before.num_computed
            if gained > 0 and before.cache_key is not None:
                return
            num_tokens += max(0, gained)
        if num_tokens:
            self._add(num_tokens, view.now_s - last[1])

    def estimate(self) -> StepTime | None:
        """None before the first step that counts."""
        if not self._weight:
            return None
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        token_s = (self._xy / self._weight - x * y) / variance if variance > 1e-6 * x * x else 0.0
        token_s = min(max(token_s, 0.0), y / x)  # neither a step nor a token takes less than no time
        return StepTime(y - token_s * x, token_s)

    def _add(self, num_tokens: int, seconds: float) -> None:
        self._weight = self._weight * FADE + 1
        self._x = self._x * FADE + num_tokens
        self._y = self._y * FADE + seconds
        self._xx = self._xx * FADE + num_tokens * num_tokens
        self._xy = self._xy * FADE + num_tokens * seconds
