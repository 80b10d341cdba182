"""How many tokens are worth drafting for one sequence, from what was accepted before and what a step costs.

With acceptance a for each draft, a step of k drafts is expected to commit (1 - a^(k+1)) / (1 - a) tokens (Leviathan et
al., 2022); it pays when that is more than its cost, draft and verification and all, in plain steps. Nothing here sees
the drafts of the step that it decides about, so the length is a stopping time and no verification rule is biased by it.
"""

from __future__ import annotations

from pluglm_spec_decode.step_costs import StepCosts

PRIOR_ACCEPTANCE = 0.7
MEMORY = 0.85  # weight of all outcomes before, at that of one more draft
MARGIN = 1.05  # it is switched on again only when it pays by this factor
PROBE_DRAFTS = 1  # of the trial while it is switched off
MIN_PAUSE, MAX_PAUSE = 8, 128  # steps before a trial; doubled by each that fails


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Committed by one step, the token behind the drafts included."""
    if acceptance >= 1:
        return 1.0 + num_drafts
    return float((1 - acceptance ** (num_drafts + 1)) / (1 - acceptance))


class DraftLength:
    """A length for one sequence. `limit` is what may be drafted now; `observe` is told once of each step it was for."""

    def __init__(self, most: int, acceptance: float = PRIOR_ACCEPTANCE) -> None:
        self._most = most
        self.acceptance = acceptance  # estimated share of drafts that are kept among those that are reached
        self.is_tested = False  # some draft was verified, so it is more than what was assumed
        self._wait: int | None = None  # steps until the next trial; None while switched on
        self._pause = MIN_PAUSE

    @property
    def is_on(self) -> bool:
        return self._wait is None

    def limit(self, costs: StepCosts, num_sequences: int) -> int:
        """The number of drafts with the best expected speed-up; 0 while switched off, except in a trial."""
        if self._wait is None:
            drafts, speedup = self._best(costs, num_sequences)
            return drafts if speedup >= 1 else 0
        if self._wait or self._speedup(1.0, costs, num_sequences)[1] <= 1:  # a trial could not change anything
            return 0
        return min(PROBE_DRAFTS, self._most)

    def observe(self, num_proposed: int, num_accepted: int, costs: StepCosts, num_sequences: int) -> None:
        """A step verified num_proposed drafts and kept the first num_accepted."""
        self.is_tested = self.is_tested or num_proposed > 0
        self.acceptance = 1 - (1 - self.acceptance) * MEMORY ** min(num_accepted, num_proposed)
        if num_accepted < num_proposed:
            self.acceptance *= MEMORY
        if self._wait is None:
            if self._best(costs, num_sequences)[1] < 1:
                self._wait = self._pause
        elif self._wait:
            self._wait -= 1
        elif num_proposed:  # a trial that found nothing to propose goes on
            self._judge(self._best(costs, num_sequences)[1])

    def _judge(self, speedup: float) -> None:
        if speedup > MARGIN:
            self._wait, self._pause = None, MIN_PAUSE
        else:
            self._pause = min(2 * self._pause, MAX_PAUSE)
            self._wait = self._pause

    def _best(self, costs: StepCosts, num_sequences: int) -> tuple[int, float]:
        return self._speedup(self.acceptance, costs, num_sequences)

    def _speedup(self, acceptance: float, costs: StepCosts, num_sequences: int) -> tuple[int, float]:
        """(number of drafts, expected speed-up) of the best length; the fewest of equals.

        Time is worth what the whole batch makes of it: where that is known, a length is best that leaves most tokens
        when its time is paid for (Dinkelbach, 1967, on ratios), and its speed-up is over what the batch has.
        """
        speed = costs.speed(num_sequences)
        found = []
        for drafts in range(1, self._most + 1):
            tokens, ratio = expected_tokens(acceptance, drafts), costs.ratio(num_sequences, drafts)
            speedup = tokens / (1 + (speed or 1.0) * (ratio - 1))
            found.append((speedup if speed is None else tokens - speed * ratio, -drafts, speedup))
        _, drafts, speedup = max(found)
        return -drafts, speedup
