"""A float64 oracle of every step for one row, written from the definitions with numpy and plain loops.

Definitions: the papers and references that the steps' modules name; ties by id. Of the code under test it uses the coin
alone, which test_philox.py compares with published vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pluglm.kernel.core import SampleRow
from pluglm.verification.randomness import Purpose, uniform

Row = NDArray[np.float64]
Result = tuple[Row, float]  # logits, and how far the nearest comparison was from turning out the other way
SURE = math.inf


def softmax(logits: Row) -> Row:
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def entropy(probs: Row) -> float:
    return -sum(p * math.log(p) for p in probs.tolist() if p > 0)


def live(logits: Row) -> list[int]:
    return [int(token) for token in np.flatnonzero(logits > -np.inf)]


def keep(logits: Row, ids: Iterable[int]) -> Row:
    return np.where(np.isin(np.arange(len(logits)), list(ids)), logits, -np.inf)


def prefix(order: Sequence[int], probs: Row, mass: float) -> tuple[list[int], float]:
    """The shortest prefix of the order with that mass, and how near a sum came to it."""
    kept, total, margin = [], 0.0, SURE
    for token in order:
        kept.append(token)
        total += probs[token]
        margin = min(margin, abs(total - mass))
        if total >= mass:
            break
    return kept, margin


def above(values: dict[int, float], floor: float) -> tuple[list[int], float]:
    kept = [token for token, value in values.items() if value >= floor]
    return kept, min((abs(value - floor) for value in values.values()), default=SURE)


def allowed_tokens(logits: Row, row: SampleRow) -> Result:
    wanted = row.params.allowed_token_ids
    return (logits if wanted is None else keep(logits, set(wanted))), SURE


def bad_words(logits: Row, row: SampleRow) -> Result:
    text = row.output_token_ids
    banned = {word[-1] for word in row.params.bad_words_ids if [*text, word[-1]][-len(word) :] == list(word)}
    return keep(logits, set(range(len(logits))) - banned), SURE


def min_tokens(logits: Row, row: SampleRow) -> Result:
    is_short = len(row.output_token_ids) < row.params.min_tokens
    return keep(logits, set(range(len(logits))) - (set(row.params.stop_token_ids) if is_short else set())), SURE


def logit_bias(logits: Row, row: SampleRow) -> Result:
    result = logits.copy()
    for token, bias in row.params.logit_bias.items():
        result[token] = min(result[token] + bias, float(np.finfo(np.float32).max))
    return result, SURE


def repetition_penalty(logits: Row, row: SampleRow) -> Result:
    result, factor = logits.copy(), row.params.repetition_penalty
    for token in {*row.prompt_token_ids, *row.output_token_ids}:
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    return result, SURE


def frequency_penalty(logits: Row, row: SampleRow) -> Result:
    result = logits.copy()
    for token in row.output_token_ids:
        result[token] -= row.params.frequency_penalty
    return result, SURE


def presence_penalty(logits: Row, row: SampleRow) -> Result:
    result = logits.copy()
    for token in set(row.output_token_ids):
        result[token] -= row.params.presence_penalty
    return result, SURE


def dry(logits: Row, row: SampleRow) -> Result:
    params, text, result = row.params, [*row.prompt_token_ids, *row.output_token_ids], logits.copy()
    longest: dict[int, int] = {}
    for place, token in enumerate(text):
        run = 0
        while run < place and text[place - 1 - run] == text[-1 - run] not in params.dry_breaker_ids:
            run += 1
        longest[token] = max(longest.get(token, 0), run)
    for token, run in longest.items():
        if params.dry_multiplier > 0 and run >= params.dry_allowed_length and token not in params.dry_breaker_ids:
            result[token] -= params.dry_multiplier * params.dry_base ** (run - params.dry_allowed_length)
    return result, SURE


def temperature(logits: Row, row: SampleRow) -> Result:
    return (logits - logits.max()) / row.params.temperature, SURE


def dynamic_temperature(logits: Row, row: SampleRow) -> Result:
    params, num_live = row.params, len(live(logits))
    if params.dynatemp_high == 0:
        return logits, SURE
    share = entropy(softmax(logits)) / math.log(num_live) if num_live > 1 else 0.0
    heat = params.dynatemp_low + (params.dynatemp_high - params.dynatemp_low) * share**params.dynatemp_exponent
    return (logits - logits.max()) / max(heat, 1e-5), SURE


def top_n_sigma(logits: Row, row: SampleRow) -> Result:
    if row.params.top_n_sigma == 0:
        return logits, SURE
    values = {token: float(logits[token]) for token in live(logits)}
    floor = max(values.values()) - row.params.top_n_sigma * float(np.std(list(values.values())))
    ids, margin = above(values, floor)
    return keep(logits, ids), margin if floor < max(values.values()) else SURE


def ranking(logits: Row) -> list[int]:
    values = logits.tolist()
    return sorted(live(logits), key=lambda token: (-values[token], token))


def top_k(logits: Row, row: SampleRow) -> Result:
    k = row.params.top_k
    return (keep(logits, ranking(logits)[:k]) if k > 0 else logits), SURE


def top_p(logits: Row, row: SampleRow) -> Result:
    if row.params.top_p == 1:
        return logits, SURE
    ids, margin = prefix(ranking(logits), softmax(logits), row.params.top_p)
    return keep(logits, ids), margin


def top_k_top_p(logits: Row, row: SampleRow) -> Result:
    by_p, margin = top_p(logits, row)
    return keep(logits, set(live(top_k(logits, row)[0])) & set(live(by_p))), margin


def min_p(logits: Row, row: SampleRow) -> Result:
    if row.params.min_p == 0:
        return logits, SURE
    best = float(logits.max())
    ids, margin = above({token: math.exp(float(logits[token]) - best) for token in live(logits)}, row.params.min_p)
    return keep(logits, ids), SURE if row.params.min_p == 1 else margin


def typical_p(logits: Row, row: SampleRow) -> Result:
    if row.params.typical_p == 1:
        return logits, SURE
    ids, best = live(logits), float(logits.max())
    rest = math.log(sum(math.exp(logits[token] - best) for token in ids))
    surprise = {token: rest + best - float(logits[token]) for token in ids}
    probs = softmax(logits)
    expected = entropy(probs)
    oddness = {token: abs(surprise[token] - expected) for token in ids}
    order = sorted(ids, key=lambda token: (oddness[token], token))
    kept, margin = prefix(order, probs, row.params.typical_p)
    if len(kept) < len(order):  # who comes next may be a tie but for rounding: only exact ones are decided by id
        gap = oddness[order[len(kept)]] - oddness[kept[-1]]
        same = logits[order[len(kept)]] == logits[kept[-1]]
        margin = margin if same else min(margin, gap)
    return keep(logits, kept), margin


def cut(logits: Row, floor: float) -> Result:
    probs = softmax(logits)
    ids, margin = above({token: float(probs[token]) for token in live(logits)}, min(floor, float(probs.max())))
    return keep(logits, ids), margin if floor < probs.max() else abs(floor - float(probs.max())) or SURE


def epsilon_cutoff(logits: Row, row: SampleRow) -> Result:
    return (logits, SURE) if row.params.epsilon_cutoff == 0 else cut(logits, row.params.epsilon_cutoff)


def eta_cutoff(logits: Row, row: SampleRow) -> Result:
    eta = row.params.eta_cutoff
    floor = min(eta, math.sqrt(eta) * math.exp(-entropy(softmax(logits))))
    return (logits, SURE) if eta == 0 else cut(logits, floor)


def without_top_choices(logits: Row, threshold: float) -> Result:
    """XTC when its coin fires."""
    probs = softmax(logits)
    ids, margin = above({token: float(probs[token]) for token in live(logits)}, threshold)
    tops = set(ids)
    ranked = [token for token in ranking(logits) if token in tops]
    return keep(logits, set(live(logits)) - set(ranked[:-1])), margin if threshold > 0 else SURE


def xtc(logits: Row, row: SampleRow) -> Result:
    fires = uniform(row.seed, row.lane, row.position, Purpose.STEP) < row.params.xtc_probability
    return without_top_choices(logits, row.params.xtc_threshold) if fires else (logits, SURE)


def zipf_count(logits: Row, mu: float) -> Result:
    """How many tokens mirostat 1 keeps (a real number still), and the paper's estimate of Zipf's exponent."""
    probs = sorted((one for one in softmax(logits).tolist() if one > 0), reverse=True)
    if len(probs) < 2:
        return np.array([1.0]), SURE
    top, upper, lower = probs[:100], 0.0, 0.0
    for rank in range(1, len(top)):
        step = math.log((rank + 1) / rank)
        upper, lower = upper + step * math.log(top[rank - 1] / top[rank]), lower + step * step
    exponent = upper / lower
    excess = exponent - 1
    if exponent < 1e-6 or abs(excess) < 1e-6:
        return np.array([1.0]), 0.0  # a limit: not compared here
    try:
        count = ((excess * 2**mu) / (1 - len(probs) ** -excess)) ** (1 / exponent)
    except OverflowError:
        count = math.inf
    return np.array([count]), exponent


def surprising(logits: Row, version: int, mu: float) -> Result:
    """What mirostat keeps of a row at this mu, in bits."""
    if version == 1:
        (count,), exponent = zipf_count(logits, mu)
        size = int(min(max(count, 1.0), len(logits)))
        margin = min(abs(count - max(size, 2)), abs(count - size - 1)) if count > 1 else abs(count - 2)
        kept = ranking(logits)[:size]
        return keep(logits, kept), min(margin / max(1.0, count), exponent) if len(live(logits)) > 1 else SURE
    bits = {token: -math.log2(p) for token, p in enumerate(softmax(logits).tolist()) if p > 0}
    least = min(bits.values())
    kept = [token for token, one in bits.items() if one <= max(mu, least)]
    return keep(logits, kept), min(abs(one - mu) for one in bits.values()) if mu > least else SURE


def mirostat(logits: Row, row: SampleRow) -> Result:
    """Of the first token of an output."""
    params = row.params
    return surprising(logits, params.mirostat, 2 * params.mirostat_tau) if params.mirostat else (logits, SURE)


STEPS: dict[str, Callable[[Row, SampleRow], Result]] = {
    one.__name__: one
    for one in (
        allowed_tokens, bad_words, min_tokens, logit_bias, repetition_penalty, frequency_penalty, presence_penalty, dry,
        temperature, dynamic_temperature, top_n_sigma, top_k, top_p, top_k_top_p, min_p, typical_p, epsilon_cutoff,
        eta_cutoff, xtc, mirostat,
    )
}  # fmt: skip


def after(names: Iterable[str], logits: Row, row: SampleRow) -> Result:
    """The row behind these steps, all -inf when masks leave no token, and the smallest margin."""
    margin = SURE
    for name in names:
        if not live(logits):
            break
        logits, one = STEPS[name](logits.astype(np.float64), row)
        margin = min(margin, one)
    return logits, margin


def distribution(names: Iterable[str], logits: Row, row: SampleRow) -> Result:
    """Probabilities instead of logits; all 0 for an empty row."""
    result, margin = after(names, logits, row)
    return (softmax(result) if live(result) else np.zeros_like(result)), margin
