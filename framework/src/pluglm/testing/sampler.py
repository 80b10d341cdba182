"""The contract kit of samplers: ties, keys, independence and the law of the draws. Knows no logits step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentUser
from pluglm.kernel.interfaces.sampler import FINAL_ROWS, NO_TOKEN, EarlyParamsChecker, FinalRows, Sampler
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks, provides
from pluglm.testing.context import make_context, resolve_component, small_spec
from pluglm.testing.sampler_laws import WARM, law_checks, temperature_divides_the_logits
from pluglm.testing.sampler_rows import final_row_checks

# R: rows, V: vocabulary

Make = Callable[[int], Sampler]
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
KINDS = (GREEDY, SAMPLED, SamplingParams(top_k=3, repetition_penalty=1.5, min_p=0.1))


def sampler_checks(cls: type[Any], config: Any = None) -> Iterator[Check]:
    """Every check of a sampler class; what its `check` refuses (temperature 1, or 2) is not asked of it.

    Final rows are checked where the tag FINAL_ROWS is declared, and the class must declare it if it has them.
    """
    config = cls.Config() if config is None else config

    def make(vocab_size: int) -> Sampler:
        sampler: Sampler = cls(config, make_context(spec=small_spec(vocab_size)))
        return sampler

    yield from common_checks("sampler", cls, config, lambda: make(17))
    params = SAMPLED if _takes(make(17), SAMPLED) else GREEDY
    for function in ANY_MODE:
        yield make_check(function, make, params)
    if hasattr(cls, "check"):
        yield make_check(refusals_are_one_line, make)
    if issubclass(cls, EarlyParamsChecker):
        yield make_check(early_refusals_hold_later, make, cls, config)
    if params is SAMPLED:
        yield make_check(masked_tokens_are_never_drawn, make)
        yield make_check(large_logits_do_not_overflow, make)
        yield from law_checks(make)
    if _takes(make(17), WARM):
        yield make_check(temperature_divides_the_logits, make)
    yield make_check(final_rows_are_declared, cls, config)
    if provides(cls, config, FINAL_ROWS):
        yield from final_row_checks(make, partial(_takes, make(17)))


def final_rows_are_declared(cls: type[Any], config: Any) -> None:
    has, says = issubclass(cls, FinalRows), provides(cls, config, FINAL_ROWS)
    expect(has == says, f"the tag {FINAL_ROWS} and the method final_rows, or neither", f"tag {says}, method {has}")


def _takes(sampler: Any, params: SamplingParams) -> bool:
    return not hasattr(sampler, "check") or sampler.check(params) is None


def keyed_row(params: SamplingParams, *, seed: int = 7, lane: int = 0, position: int = 0) -> SampleRow:
    """A row of a short request, drawn under this key."""
    return SampleRow(
        params=params,
        prompt_token_ids=(1, 2),
        output_token_ids=[3] * min(position, 4),
        seed=seed,
        lane=lane,
        position=position,
    )


def random_logits(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """logits_RV float32, normal."""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def draw(sampler: Sampler, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One call that leaves the caller's logits alone."""
    with torch.inference_mode():
        return sampler.sample(logits_RV.clone(), rows)


def greedy_takes_the_lowest_best_id(make: Make, params: SamplingParams) -> None:
    logits_RV = (random_logits(40, 17, 1) * 2).round()  # whole numbers tie often
    logits_RV[::3, :4] = float("-inf")
    expected = [row.index(max(row)) for row in logits_RV.tolist()]
    found = draw(make(17), logits_RV, [keyed_row(GREEDY, position=i) for i in range(40)])
    expect(found == expected, f"the lowest id of each maximum, {expected}", found)


def greedy_draws_nothing(make: Make, params: SamplingParams) -> None:
    logits_RV = torch.tensor([[1.0, 1.0 + 1e-6, 1.0, 0.999999, 1.0]]).repeat(200, 1)
    rows = [keyed_row(GREEDY, seed=i * 1_000_003, lane=i % 3, position=i) for i in range(200)]
    found = set(draw(make(5), logits_RV, rows))
    expect(found == {1}, "the same best token under every key, {1}", found)


def gives_one_id_a_row(make: Make, params: SamplingParams) -> None:
    for num_rows in (1, 3, 64):
        rows = [keyed_row(params, seed=i) for i in range(num_rows)]
        found = draw(make(17), random_logits(num_rows, 17, num_rows), rows)
        expect(len(found) == num_rows, f"{num_rows} ids", found)
        in_range = all(isinstance(one, int) and 0 <= one < 17 for one in found)
        expect(in_range, "Python ints from 0 to 16", found)


def same_key_same_token(make: Make, params: SamplingParams) -> None:
    """Two samplers of two engines, and the same one again."""
    logits_RV = random_logits(50, 17, 2)
    rows = [keyed_row(params, seed=2**64 - 1 - i, lane=i % 4, position=i) for i in range(50)]
    sampler = make(17)
    first, second, third = (
        draw(sampler, logits_RV, rows),
        draw(sampler, logits_RV, rows),
        draw(make(17), logits_RV, rows),
    )
    expect(first == second == third, f"the same ids for the same keys, {first}", f"{second} and {third}")


def rows_are_independent(make: Make, params: SamplingParams) -> None:
    """Alone, in any order and beside greedy neighbours, a row gets the same token."""
    logits_RV = random_logits(30, 17, 3)
    rows = [keyed_row(GREEDY if i % 5 == 0 else params, seed=i, position=i) for i in range(30)]
    sampler = make(17)
    together = draw(sampler, logits_RV, rows)
    alone = [draw(sampler, logits_RV[i : i + 1], rows[i : i + 1])[0] for i in range(30)]
    expect(alone == together, f"the ids of each row alone, {alone}", together)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).tolist()
    permuted = draw(sampler, logits_RV[order], [rows[i] for i in order])
    expected = [together[i] for i in order]
    expect(permuted == expected, f"the same ids in another order of rows, {expected}", permuted)


def earlier_calls_leave_no_trace(make: Make, params: SamplingParams) -> None:
    logits_RV, rows = random_logits(20, 17, 4), [keyed_row(params, seed=i) for i in range(20)]
    fresh = draw(make(17), logits_RV, rows)
    used = make(17)
    for call in range(7):
        draw(used, random_logits(9, 17, 50 + call), [keyed_row(params, seed=call, position=i) for i in range(9)])
    found = draw(used, logits_RV, rows)
    expect(found == fresh, f"the ids of an unused sampler, {fresh}", found)


def global_generators_are_left_alone(make: Make, params: SamplingParams) -> None:
    """Neither read nor advanced: other code in the process may depend on them."""
    logits_RV, rows = random_logits(20, 17, 5), [keyed_row(params, seed=i) for i in range(20)]
    sampler = make(17)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    draw(sampler, logits_RV, rows)
    moved = not torch.equal(torch.get_rng_state(), torch_state) or random.getstate() != python_state
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    expect(not moved, "the global random generators as they were", "one of them advanced")


def rows_are_not_changed(make: Make, params: SamplingParams) -> None:
    rows, same = ([keyed_row(params, seed=i, position=i) for i in range(6)] for _ in range(2))
    draw(make(17), random_logits(6, 17, 6), rows)
    expect(rows == same, "rows and their token lists as given", rows)


def a_row_without_a_token_gives_no_token_alone(make: Make, params: SamplingParams) -> None:
    """NO_TOKEN for a row of -inf, drawn or greedy; the others get what they get beside a row of finite logits."""
    sampler, logits_RV = make(17), random_logits(8, 17, 7)
    for empty, empty_params in ((0, params), (5, GREEDY), (7, params)):
        rows = [keyed_row(GREEDY if i == 5 else params, seed=i, position=i) for i in range(8)]
        expected = draw(sampler, logits_RV, rows)
        expected[empty], rows[empty] = NO_TOKEN, keyed_row(empty_params, seed=empty, position=empty)
        emptied_RV = logits_RV.clone()
        emptied_RV[empty] = float("-inf")
        found = draw(sampler, emptied_RV, rows)
        expect(found == expected, f"{NO_TOKEN} for row {empty} and the others as before, {expected}", found)


def refusals_are_one_line(make: Make) -> None:
    """`check` answers for every kind of params: None or a reason of one line."""
    sampler: Any = make(17)
    for params in KINDS:
        _require_one_line(sampler.check(params))


def early_refusals_hold_later(make: Make, cls: type[Any], config: Any) -> None:
    """`check_early` answers in one line too, and refuses nothing that the built sampler takes."""
    uses: Sequence[Any] = cls.uses(config) if isinstance(cls, ComponentUser) else ()
    sampler, parts = make(17), [resolve_component(*one)[0] for one in uses]
    for params in KINDS:
        reason = cls.check_early(config, params, parts)
        _require_one_line(reason)
        expect(reason is None or not _takes(sampler, params), "nothing refused that `check` takes", repr(reason))


def _require_one_line(reason: object) -> None:
    is_text = isinstance(reason, str) and bool(reason.strip()) and "\n" not in reason
    expect(reason is None or is_text, "None or one line of text", repr(reason))


def masked_tokens_are_never_drawn(make: Make) -> None:
    logits_RV = torch.full((600, 17), float("-inf"))
    logits_RV[:200, 16] = -50.0
    logits_RV[200:400, 0] = 3.0
    logits_RV[400:, [2, 9]] = torch.tensor([0.0, -4.0])
    found = draw(make(17), logits_RV, [keyed_row(SAMPLED, seed=i) for i in range(600)])
    bad = [token for row, token in zip(logits_RV, found, strict=True) if row[token] == float("-inf")]
    expect(not bad, "only tokens with a finite logit", f"masked tokens {bad}")


def large_logits_do_not_overflow(make: Make) -> None:
    logits_RV = torch.tensor([[3.0e4, -3.0e4, 3.0e4, 0.0, -1.0e30]]).repeat(300, 1)
    found = set(draw(make(5), logits_RV, [keyed_row(SAMPLED, seed=i) for i in range(300)]))
    expect(found == {0, 2}, "both of the two equally likely tokens, {0, 2}", found)


ANY_MODE = (
    greedy_takes_the_lowest_best_id,
    greedy_draws_nothing,
    gives_one_id_a_row,
    same_key_same_token,
    rows_are_independent,
    earlier_calls_leave_no_trace,
    global_generators_are_left_alone,
    rows_are_not_changed,
    a_row_without_a_token_gives_no_token_alone,
)
