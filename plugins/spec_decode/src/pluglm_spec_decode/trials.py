"""When drafts that do not seem to pay are tried again: rarely, ever more so, and for a small share of the time."""

from __future__ import annotations

SHARE = 0.005  # of all time, that trials may cost at most
MIN_PAUSE, MAX_PAUSE = 32, 2048  # steps before a trial of a class; doubled by each that fails


class Trials:
    """Of classes of drafts. Time is in the unit of whoever calls."""

    def __init__(self) -> None:
        self._step = 0
        self._saved = 0.0
        self._due: dict[int, int] = {}
        self._pause: dict[int, int] = {}
        self._in_a_row: dict[int, int] = {}

    def is_due(self, kind: int) -> bool:
        return self._step >= self._due.get(kind, MIN_PAUSE)

    def can_pay(self, cost: float) -> bool:
        return cost <= self._saved

    def end_step(self, time: float, num_steps: int = 1) -> None:
        """time: of each of so many steps."""
        self._step += num_steps
        self._saved += SHARE * time * num_steps

    def failed(self, kind: int, cost: float) -> None:
        """It cost that and found nothing, or there is nothing to be found."""
        self._saved -= cost
        self._in_a_row.pop(kind, None)
        self._pause[kind] = min(2 * self._pause.get(kind, MIN_PAUSE), MAX_PAUSE)
        self._due[kind] = self._step + self._pause[kind]

    def succeeded(self, kind: int, cost: float) -> int:
        """It cost that, less than nothing where it paid; the next may come at once. Returns how many did in a row."""
        self._saved -= cost
        self._due[kind] = self._step
        self._in_a_row[kind] = self._in_a_row.get(kind, 0) + 1
        return self._in_a_row[kind]

    def seen(self, kind: int) -> None:
        """A draft of it was verified, in a trial or not, so no other is needed for a while."""
        if not self._in_a_row.get(kind):
            self._due[kind] = max(self._due.get(kind, 0), self._step + MIN_PAUSE)

    def paid(self, kind: int) -> None:
        """Drafts of it were made for their own sake: the next pause is short."""
        self._pause.pop(kind, None)
        self._in_a_row.pop(kind, None)
