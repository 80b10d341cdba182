"""Adaptive drafters on a scripted clock, and with a fixed cost: what is asked of the drafter proper, and when."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from pluglm.kernel.interfaces.drafter import ADAPTS, ROWS, SHARES, Proposal
from pluglm.testing.drafter import draft_request, ids_of
from pluglm_spec_decode.adaptive import AdaptiveConfig, AdaptiveDrafter
from pluglm_spec_decode.draft_model import DraftModelConfig, DraftModelDrafter
from pluglm_spec_decode.ngram import NgramConfig, NgramDrafter
from pluglm_spec_decode.resting import STEPS
from pluglm_spec_decode.suffix import SuffixConfig, SuffixDrafter
from pluglm_spec_decode.universal import UniversalConfig


class Clock:
    """Seconds that go by only when told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Counting(AdaptiveDrafter):
    """Proposes as many zeros as it may, and notes what it was asked for. A draft takes draft_s."""

    interface_version = 2
    Config = AdaptiveConfig

    def __init__(self, config, clock, draft_s=0.0):
        super().__init__(config, clock)
        self.clock, self.draft_s, self.asked = clock, draft_s, []

    def _propose(self, requests):
        self.asked.append([(one.sequence_id, one.max_tokens) for one in requests])
        counts = [min(one.max_tokens, self._most) for one in requests]
        self.clock.now_s += self.draft_s * sum(counts)
        return [Proposal([0] * count) for count in counts]


class Target:
    """Runs steps: so much time for a row, and drafts accepted with a given chance."""

    def __init__(self, drafter, clock, base_s, row_s, acceptance, seed=0):
        self.drafter, self.clock, self.base_s, self.row_s = drafter, clock, base_s, row_s
        self.acceptance, self.generator, self.texts = acceptance, random.Random(seed), {}

    def step(self, *sequence_ids):
        """(drafts, committed tokens) of all."""
        texts = [self.texts.setdefault(one, [1]) for one in sequence_ids]
        requests = [
            draft_request(text, sequence_id=one, max_tokens=99) for one, text in zip(sequence_ids, texts, strict=True)
        ]
        self.clock.now_s += 5.0  # idle: the caller's time is no part of a step
        drafts = [len(one) for one in ids_of(self.drafter.propose(requests))]
        self.clock.now_s += self.base_s + self.row_s * (len(drafts) + sum(drafts))
        committed = 0
        for sequence_id, text, count in zip(sequence_ids, texts, drafts, strict=True):
            kept = 0
            while kept < count and self.generator.random() < self.acceptance:
                kept += 1
            text += [0] * (kept + 1)
            committed += kept + 1
            self.drafter.observe(sequence_id, kept, [*[0] * kept, 1])
        return sum(drafts), committed


def make(acceptance, base_s=0.020, row_s=0.001, draft_s=0.0, cls=Counting, **config):
    clock = Clock()
    drafter = cls(AdaptiveConfig(num_tokens=8, **{"adaptive": True, **config}), clock, draft_s)
    return Target(drafter, clock, base_s, row_s, acceptance)


def total(target, steps, *sequence_ids):
    pairs = [target.step(*sequence_ids) for _ in range(steps)]
    return tuple(map(sum, zip(*pairs, strict=True)))


def test_drafts_that_are_kept_are_made_to_the_end():
    target = make(acceptance=1.0)
    total(target, 20, 0)
    drafts, committed = total(target, 64, 0)
    assert drafts >= 62 * 8  # but for a plain step that is measured
    assert committed == drafts + 64


def test_drafts_that_are_refused_cease():
    target = make(acceptance=0.0, base_s=0.010, row_s=0.010)
    total(target, 40, 0)
    before = len(target.drafter.asked)
    drafts, _ = total(target, 600, 0)
    assert drafts <= 10
    assert sum(bool(asked) for asked in target.drafter.asked[before:]) <= 10  # nor is the drafter proper asked


class Silent(Counting):
    """Takes its time and has nothing to say."""

    def _propose(self, requests):
        super()._propose(requests)
        return [Proposal([]) for _ in requests]


def test_a_drafter_that_proposes_nothing_is_hardly_asked():
    target = make(acceptance=1.0, draft_s=0.005, cls=Silent)
    total(target, 100, 0)
    before = len([asked for asked in target.drafter.asked if asked])
    total(target, 2000, 0)
    assert len([asked for asked in target.drafter.asked if asked]) - before <= 10


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(("row_s", "draft_s"), [(0.0005, 0.0), (0.004, 0.0), (0.0005, 0.008), (0.02, 0.02)])
def test_time_for_a_token_is_never_much_over_that_without_drafts(acceptance, row_s, draft_s):
    """The measured identity, over 1,500 steps: (draft + verify + manage) / committed."""
    target = make(acceptance, base_s=0.020, row_s=row_s, draft_s=draft_s)
    _, committed = total(target, 1500, 0)
    spent_s = target.clock.now_s - 1500 * 5.0
    assert spent_s / committed <= 1.03 * (0.020 + row_s)


def test_time_for_a_token_is_near_the_best_fixed_length():
    """Acceptance 0.8 and rows of a twentieth: the closed form says 1.9 to 2.0 times as fast with 4 to 8 drafts."""
    target = make(0.8, base_s=0.019, row_s=0.001)
    _, committed = total(target, 1500, 0)
    spent_s = target.clock.now_s - 1500 * 5.0
    best = min((0.02 + 0.001 * k) * (1 - 0.8) / (1 - 0.8 ** (k + 1)) for k in range(9))
    assert spent_s / committed <= 1.12 * best


def test_the_cost_is_that_of_the_present_batch():
    """Rows are nearly free for one sequence and dear for many, as on a device that is busy with a few rows."""
    clock = Clock()
    drafter = Counting(AdaptiveConfig(num_tokens=8, adaptive=True), clock)
    target = Target(drafter, clock, 0.020, 0.0, acceptance=0.5)
    many = tuple(range(1, 17))
    for _ in range(30):
        target.row_s = 0.0
        total(target, 4, 0)
        target.row_s = 0.02
        total(target, 4, *many)
    target.row_s = 0.0
    alone, _ = total(target, 10, 0)
    target.row_s = 0.02
    together, _ = total(target, 10, *many)
    assert alone >= 40
    assert together <= 20


def test_sequences_have_their_own_lengths():
    target = make(1.0, draft_cost=0.1)
    for _ in range(40):
        target.acceptance = 1.0
        good, _ = target.step(0)
        target.acceptance = 0.0
        bad, _ = target.step(1)
    assert (good, bad) == (8, 0)
    target.drafter.release(1)
    assert target.step(1)[0] > 0


def test_a_sequence_begins_with_what_the_ones_before_it_came_to():
    """By the clock only: with a fixed cost each has its own past alone."""
    for config, is_shared in (({}, True), ({"draft_cost": 0.2}, False)):
        target = make(0.0, row_s=0.004, **config)
        for sequence_id in range(12):
            total(target, 30, sequence_id)
            target.drafter.release(sequence_id)
        first, _ = total(target, 3, 99)
        assert (first == 0) is is_shared


def test_with_a_fixed_cost_the_clock_is_of_no_matter():
    slow, fast = make(0.7, draft_cost=0.1, row_s=9.0), make(0.7, draft_cost=0.1, row_s=0.0)
    assert [slow.step(0, 1) for _ in range(200)] == [fast.step(0, 1) for _ in range(200)]


def test_equal_clocks_give_equal_drafts():
    one, other = make(0.6), make(0.6)
    assert [one.step(0, 1, 2) for _ in range(300)] == [other.step(0, 1, 2) for _ in range(300)]


def test_proposing_again_gives_the_same():
    target = make(0.6)
    for _ in range(60):
        target.step(0)
        request = draft_request(target.texts[0], max_tokens=99)
        first = ids_of(target.drafter.propose([request]))
        target.clock.now_s += 77
        assert ids_of(target.drafter.propose([request])) == first


def test_without_the_key_all_is_handed_on():
    target = make(0.0, adaptive=False)
    assert [target.step(0)[0] for _ in range(50)] == [8] * 50
    assert target.drafter.asked[-1] == [(0, 99)]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rules_whose_text_depends_on_lengths_need_a_fixed_cost(rule):
    by_clock = DraftModelConfig(model="m", adaptive=True)
    by_cost = DraftModelConfig(model="m", adaptive=True, draft_cost=0.1)
    assert f"verification:{rule}" in DraftModelDrafter.capabilities(by_clock).refuses
    for config in (by_cost, DraftModelConfig(model="m")):
        assert not DraftModelDrafter.capabilities(config).refuses


@pytest.mark.parametrize(
    ("cls", "fields"),
    [(NgramConfig, {}), (SuffixConfig, {}), (DraftModelConfig, {"model": "m"}), (UniversalConfig, {"model": "m"})],
)
def test_a_cost_that_nothing_would_look_at_is_refused(cls, fields):
    for cost in (0.0, 0.1):
        with pytest.raises(ValidationError, match="draft_cost is used only with adaptive: true"):
            cls(**fields, draft_cost=cost)
        assert cls(**fields, adaptive=True, draft_cost=cost).draft_cost == cost
    assert cls(**fields, draft_cost=None).draft_cost is None


def test_tags():
    def provided(cls, config):
        return cls.capabilities(config).provides

    assert provided(NgramDrafter, NgramConfig()) == frozenset()
    assert provided(NgramDrafter, NgramConfig(adaptive=True, draft_cost=0.1)) == {ADAPTS}
    assert provided(NgramDrafter, NgramConfig(adaptive=True)) == {ADAPTS, SHARES}
    assert provided(SuffixDrafter, SuffixConfig(adaptive=True, draft_cost=0.1)) == {ADAPTS, SHARES}
    assert provided(SuffixDrafter, SuffixConfig(shared_tokens=0)) == frozenset()
    both = DraftModelConfig(model="m", draws=True, adaptive=True, draft_cost=1.0)
    assert provided(DraftModelDrafter, both) == {ROWS, ADAPTS}


def taught():
    """Two sequences, of whose last proposal no outcome came, and the drafts proposed."""
    target = make(0.8)
    total(target, 40, 0, 1)
    requests = [draft_request(target.texts[one], sequence_id=one, max_tokens=99) for one in (0, 1)]
    drafts = ids_of(target.drafter.propose(requests))
    assert all(drafts)
    return target.drafter, drafts


def test_outcomes_of_steps_without_a_proposal_say_nothing():
    """As when running sequences leave no room for drafts in a step's budget: then nobody is asked."""
    drafter, drafts = taught()
    for sequence_id in (0, 1):
        drafter.observe(sequence_id, len(drafts[sequence_id]), [*drafts[sequence_id], 1])
    share = drafter._shared.acceptance.share(0)
    for _ in range(50):
        drafter.observe(0, 0, [7])
        drafter.observe(1, 0, [7])
    assert drafter._shared.acceptance.share(0) == share


def test_a_draft_that_was_cut_is_not_a_refused_one():
    """As when there is no KV for it: what is committed in its place is itself."""
    drafter, drafts = taught()
    share = drafter._shared.acceptance.share(0)
    drafter.observe(0, 0, drafts[0][:1])
    assert drafter._shared.acceptance.share(0) == share
    drafter.observe(1, 0, [drafts[1][0] + 1])
    assert drafter._shared.acceptance.share(0) < share


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_clock_that_stands_still_or_goes_back_teaches_nothing(seconds):
    target = make(0.8)
    for _ in range(3):
        assert target.drafter.propose([draft_request([1, 2], sequence_id=0, max_tokens=9)])
        target.clock.now_s += seconds
        target.drafter.observe(0, 0, [9])
    assert not target.drafter._measured.has_pace


def test_measuring_plain_steps_ends_where_none_can_be_measured():
    """Every step from now on computes a prompt as well, of a sequence that nothing was proposed for."""
    target = make(0.9)
    total(target, 60, 0)
    drafter, with_drafts = target.drafter, 0
    drafter._close_step()
    while not drafter._measured.wants_plain(1):
        target.step(0)
        drafter._close_step()
    for step in range(300):
        [proposal] = drafter.propose([draft_request(target.texts[0], sequence_id=0, max_tokens=99)])
        with_drafts += bool(proposal.token_ids)
        target.clock.now_s += 0.02
        drafter.observe(1000 + step, 0, [1])
        drafter.observe(0, len(proposal.token_ids), [*proposal.token_ids, 1])
    assert with_drafts > 200


class Deciding(Counting):
    """Counts the steps in which it decided what to draft."""

    may_rest = True
    num_decisions = 0

    def _limits(self, wishes):
        self.num_decisions += 1
        return super()._limits(wishes)


class Following(Deciding):
    """As one whose drafts depend on the text."""

    may_rest = False


def test_a_drafter_that_cannot_pay_decides_seldom():
    target = make(acceptance=0.5, draft_s=0.4, cls=Deciding)
    total(target, 600, 1, 2)
    assert target.drafter.num_decisions < 600 / 8
    before = target.drafter.num_decisions
    total(target, 1, 1, 2, 3)  # whose drafts may be better ones
    assert target.drafter.num_decisions == before + 1


@pytest.mark.parametrize(
    ("acceptance", "config", "cls"),
    [(0.9, {}, Deciding), (0.0, {"draft_cost": 50.0}, Deciding), (0.0, {"draft_s": 0.4}, Following)],
)
def test_one_that_pays_or_has_a_fixed_cost_or_follows_the_text_decides_in_each_step(acceptance, config, cls):
    target = make(acceptance, cls=cls, **config)
    total(target, 200, 1)
    assert target.drafter.num_decisions == 200


def test_trials_come_when_they_would_without_rests():
    """But for the steps of one rest. Steps of a rest are among those that go by between trials."""
    tried = []
    for cls in (Deciding, Following):
        target = make(acceptance=0.0, row_s=0.010, draft_s=0.005, cls=cls)
        total(target, 50, 1)
        tried.append([step for step in range(50, 1000) if target.step(1)[0]])
    resting, following = tried
    assert len(following) >= 4
    assert len(resting) == len(following)
    assert all(0 <= late - step <= 2 * (1 + STEPS) for late, step in zip(resting, following, strict=True))


@pytest.mark.parametrize("cause", ["interrupted", "left out", "a prompt"])
def test_what_happens_in_a_rest_says_nothing_of_the_step_before_it(cause):
    """A step that was decided about has no outcome for ten minutes; a sequence of it gets one late; a prompt ends."""
    target = make(acceptance=0.0, draft_s=0.4, cls=Deciding)
    drafter, clock = target.drafter, target.clock
    total(target, 100, 1, 2)
    noted = []
    note = drafter._measured.note
    drafter._measured.note = lambda *args: (noted.append(args), note(*args))
    while not drafter._resting.spares([1, 2]):  # up to the first step of a rest
        target.step(1, 2)
    num_interrupts = 0
    for _ in range(60):
        before = drafter.num_decisions
        requests = [draft_request([1] * 50, sequence_id=one, max_tokens=99) for one in (1, 2)]
        drafter.propose(requests)
        is_decided = drafter.num_decisions > before
        clock.now_s += 0.022
        if cause == "interrupted" and is_decided and not num_interrupts:
            clock.now_s += 600.0
            num_interrupts += 1
            continue
        drafter.observe(1, 0, [1])
        if not (cause == "left out" and is_decided):
            drafter.observe(2, 0, [1])
        if cause == "a prompt" and not is_decided:
            drafter.observe(3, 0, [1])
    assert num_interrupts == (cause == "interrupted")
    assert len(noted) >= 3
    assert all(seconds < 0.03 for _, _, seconds, _ in noted)
