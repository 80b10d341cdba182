"""Adaptive drafting of whole batches on a simulated target: never much slower than plain decoding, and near the best.

Texts are given by the chance of each class of context, and steps by a curve of times over rows, with noise that a clock
sees and the result does not. What they are compared with is computed from the same curve in closed form.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from pluglm.kernel.interfaces.drafter import Proposal
from pluglm.testing.drafter import draft_request, ids_of
from pluglm_spec_decode.adaptive import AdaptiveConfig, AdaptiveDrafter

SEATS, TOKENS, PROMPT = 8, 64, 150
# Milliseconds by rows: in proportion to rows; with a first draft that is dear; of a device that waits for memory.
LINEAR = ((1, 4.0), (8, 10.5), (16, 15.0), (72, 57.0))
DEAR_FIRST = ((1, 8.0), (8, 12.1), (9, 15.0), (16, 20.0), (72, 69.0))
FLAT = ((1, 8.0), (72, 9.1))


def step_ms(curve: tuple[tuple[int, float], ...], rows: int) -> float:
    for (left, low), (right, high) in pairwise(curve):
        if rows <= right:
            return low + (high - low) * (rows - left) / (right - left)
    raise ValueError(f"no time is known for {rows} rows")


class Scripted(AdaptiveDrafter):
    """Its drafts are zeros, all of a step and sequence in one class, and each class is kept by a chance of its own."""

    interface_version = 2
    Config = AdaptiveConfig
    priors = (0.25, 0.5, 0.75, 0.9)

    def __init__(self, run, num_tokens):
        super().__init__(AdaptiveConfig(num_tokens=num_tokens, adaptive=True), lambda: run.now_ms)
        self.run, self.known = run, {}

    def _kinds(self, request):
        return [self.run.kind_of[request.sequence_id]] * min(self._most, request.max_tokens)

    def _propose(self, requests):
        counts = [min(one.max_tokens, self._most) for one in requests]
        behind = sum(len(one.token_ids) - self.known.get(one.sequence_id, 0) for one in requests)
        self.known |= {one.sequence_id: len(one.token_ids) for one in requests}
        self.run.spend(self.run.round_ms * max(counts) + self.run.token_ms * max(0, behind - 4 * len(requests)))
        return [Proposal([0] * count) for count in counts]


class Run:
    """Seats that are always taken. Every step, each text is in a class by its weight."""

    def __init__(self, curve, chances, weights, round_ms=0.0, token_ms=0.0, most=8, seats=SEATS, seed=3, prompt=PROMPT):
        self.curve, self.chances, self.weights, self.seats, self.prompt = curve, chances, weights, seats, prompt
        self.round_ms, self.token_ms, self.random = round_ms, token_ms, random.Random(seed)
        self.now_ms = self.true_ms = self.drift = 0.0
        self.kind_of, self.num_texts = {}, 0
        self.drafter, self.texts = Scripted(self, most), {}

    def spend(self, true_ms):
        """The clock's time is 5 % off, and up to a third more for many steps in a row."""
        self.drift = 0.98 * self.drift + self.random.gauss(0, 0.03)
        self.true_ms += true_ms
        self.now_ms += true_ms * math.exp(self.drift + self.random.gauss(0, 0.05))

    def step(self):
        """Committed tokens."""
        while len(self.texts) < self.seats:
            self.texts[self.num_texts] = [1] * (self.prompt + 1)
            self.drafter.observe(self.num_texts, 0, [1])
            self.num_texts += 1
        for one in self.texts:
            [self.kind_of[one]] = self.random.choices(range(len(self.chances)), self.weights)
        left = {one: self.prompt + TOKENS - len(text) for one, text in self.texts.items()}
        asked = [one for one, num in left.items() if num > 1]
        requests = [draft_request(self.texts[one], sequence_id=one, max_tokens=left[one] - 1) for one in asked]
        drafts = dict(zip(asked, map(len, ids_of(self.drafter.propose(requests))), strict=True))
        self.spend(step_ms(self.curve, len(self.texts) + sum(drafts.values())))
        committed = 0
        for one, text in list(self.texts.items()):
            kept = 0
            while kept < drafts.get(one, 0) and self.random.random() < self.chances[self.kind_of[one]]:
                kept += 1
            text += [*[0] * kept, 1]  # the token behind those that are kept is none that was drafted
            committed += kept + 1
            if len(text) >= self.prompt + TOKENS:
                del self.texts[one]
                self.drafter.release(one)
            else:
                self.drafter.observe(one, kept, text[-kept - 1 :])
        return committed

    def speed(self, steps, warm_up=300):
        """Over that without drafts, after the steps that teach it."""
        for _ in range(warm_up):
            self.step()
        before_ms, tokens = self.true_ms, sum(self.step() for _ in range(steps))
        return tokens / (self.true_ms - before_ms) / (self.seats / step_ms(self.curve, self.seats))


def best_fixed(curve, chance):
    """Of all sequences with the same number of drafts: (1 - a^(k+1)) / (1 - a) tokens in the time of B (1 + k) rows."""
    plain = step_ms(curve, SEATS)
    return max((1 - chance ** (k + 1)) / (1 - chance) * plain / step_ms(curve, SEATS * (1 + k)) for k in range(9))


@pytest.mark.parametrize("curve", [LINEAR, DEAR_FIRST, FLAT])
@pytest.mark.parametrize(
    ("chances", "weights"),
    [
        ((0.1,), (1,)),
        ((0.4,), (1,)),
        ((0.15, 0.4, 0.3, 0.6), (9, 3, 1, 1)),
        ((0.2, 0.5, 0.8, 0.95), (4, 2, 2, 4)),
        ((0.05, 0.1, 0.9, 0.0), (1, 1, 1, 1)),
    ],
)
def test_never_much_slower_than_plain_decoding(curve, chances, weights):
    assert Run(curve, chances, weights).speed(900) >= 0.97


@pytest.mark.parametrize("curve", [LINEAR, DEAR_FIRST, FLAT])
@pytest.mark.parametrize("chance", [0.6, 0.8, 0.95])
def test_near_the_best_fixed_length(curve, chance):
    """Where all drafts are alike, what is lost is for learning: clocks are off by more than a draft costs."""
    assert Run(curve, (chance,), (1,)).speed(900) >= 0.92 * best_fixed(curve, chance)


def test_only_sure_drafts_are_made_where_rows_are_dear():
    """A third of the steps of each text are sure: that beats every length that is the same for all classes."""
    chances, weights = (0.05, 0.2, 0.4, 0.95), (2, 2, 2, 3)
    mean = sum(chance * weight for chance, weight in zip(chances, weights, strict=True)) / sum(weights)
    assert Run(LINEAR, chances, weights).speed(900) >= 1.05 * best_fixed(LINEAR, mean)


@pytest.mark.parametrize("seats", [1, SEATS])
@pytest.mark.parametrize(
    ("chance", "round_ms", "token_ms"), [(0.3, 8.0, 0.0), (0.7, 9.0, 0.0), (0.97, 10.0, 0.3), (0.9, 10.0, 0.3)]
)
def test_drafters_that_cannot_pay_are_left_alone(seats, chance, round_ms, token_ms):
    """A round of drafts takes about a plain step, and a draft model has 150 tokens of prompt to compute."""
    run = Run(LINEAR if seats > 1 else FLAT, (chance,), (1,), round_ms, token_ms, most=2, seats=seats)
    assert run.speed(1500) >= 0.97


def test_a_good_draft_model_is_used():
    """Alone, with drafts for a tenth of a step that are kept by 0.8: at least 1.5 times as fast, prompts included."""
    assert Run(FLAT, (0.8,), (1,), round_ms=0.8, token_ms=0.05, most=4, seats=1).speed(900) >= 1.5


def test_equal_clocks_give_equal_steps():
    one, other = (Run(DEAR_FIRST, (0.2, 0.6), (1, 1)) for _ in range(2))
    assert [one.step() for _ in range(300)] == [other.step() for _ in range(300)]


@pytest.mark.parametrize(("seats", "prompt", "token_ms"), [(8, 150, 0.05), (1, 150, 0.05), (1, 1000, 0.05)])
def test_a_good_draft_model_is_worth_its_prompts(seats, prompt, token_ms):
    """It computes each prompt first. By always drafting speed is tokens a step times the time of a plain step, over
    that of a step with its rounds and its part of the prompts.
    """
    run = Run(FLAT, (0.85,), (1,), round_ms=0.8, token_ms=token_ms, most=4, seats=seats, prompt=prompt)
    tokens = (1 - 0.85**5) / (1 - 0.85)
    prompts_ms = seats * prompt * token_ms * tokens / TOKENS
    best = tokens * step_ms(FLAT, seats) / (step_ms(FLAT, 5 * seats) + 4 * 0.8 + prompts_ms)
    assert best > 1.3
    assert run.speed(900) >= 0.85 * best
