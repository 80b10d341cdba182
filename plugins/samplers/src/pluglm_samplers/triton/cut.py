"""top_k, top_p and min_p of one row without a sort: thresholds are searched among the bit patterns of the logits."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Source of the method: multi-way bisection for order statistics, as in radix selection (Alabi et al., "Fast k-selection
# algorithms for graphics processing units", 2012). Masses are whole numbers, so that no order of summation matters.

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def ordered(x):
    """int32 that order as the floats do; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, best):
    """exp(x - best) in units of 2**-44, int64: 2**18 of them stay below 2**63."""
    return (tl.exp(x - best) * 17592186044416.0).to(tl.int64)


@triton.jit
def add_up(source, num_columns, floor, best, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have a key of `floor` or more, or their mass; int64."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(source + columns, mask=columns < num_columns, other=float("-inf"))
        weight = tl.full((BLOCK,), 1, tl.int64)
        if IS_MASS:
            weight = mass_of(x, best)
        total += tl.where((columns < num_columns) & (ordered(x).to(tl.int64) >= floor), weight, 0)
    return tl.sum(total)


@triton.jit
def last_key(source, num_columns, low, high, wanted, best, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in low .. high that is reached by `wanted` tokens (or their mass); `low` is known to be.

    Three pivots a pass, so two bits of the answer.
    """
    while low < high:
        step = (high - low + 3) // 4
        first, second, third = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        above_1 = tl.zeros((BLOCK,), tl.int64)
        above_2 = tl.zeros((BLOCK,), tl.int64)
        above_3 = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            is_real = columns < num_columns
            x = tl.load(source + columns, mask=is_real, other=float("-inf"))
            key = ordered(x).to(tl.int64)
            weight = tl.where(is_real, tl.full((BLOCK,), 1, tl.int64), 0)
            if IS_MASS:
                weight = mass_of(x, best)
            above_1 += tl.where(key >= first, weight, 0)
            above_2 += tl.where(key >= second, weight, 0)
            above_3 += tl.where(key >= third, weight, 0)
        has_1, has_2, has_3 = tl.sum(above_1) >= wanted, tl.sum(above_2) >= wanted, tl.sum(above_3) >= wanted
        new_low = tl.where(has_3, third, tl.where(has_2, second, tl.where(has_1, first, low)))
        high = tl.where(has_3, high, tl.where(has_2, third - 1, tl.where(has_1, second - 1, first - 1)))
        low = new_low
    return low


@triton.jit
def ends_of(source, num_columns, BLOCK: tl.constexpr):
    """The largest and the smallest logit, and how many are NaN or +inf."""
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    num_odd = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_real = columns < num_columns
        x = tl.load(source + columns, mask=is_real, other=float("-inf"))
        most = tl.maximum(most, x)
        least = tl.minimum(least, tl.where(is_real, x, float("inf")))
        num_odd += ((x != x) | (x == float("inf"))).to(tl.int32)
    return tl.max(most), tl.min(least), tl.sum(num_odd)


@triton.jit
def nucleus_end(source, num_columns, low, inside, high, top_p, best, BLOCK: tl.constexpr):
    """The key that ends the nucleus, and how many tokens of this key are in it.

    The nucleus is one of the tokens with a key above `low` and of the first `inside` with that key.
    """
    above = add_up(source, num_columns, low + 1, best, True, BLOCK)
    num_low = add_up(source, num_columns, low, best, False, BLOCK)
    num_low -= add_up(source, num_columns, low + 1, best, False, BLOCK)
    share = top_p * (above + tl.minimum(inside, num_low) * mass_of(value_of(low), best)).to(tl.float64)
    wanted = share.to(tl.int64)
    wanted = tl.maximum(wanted + (share > wanted.to(tl.float64)).to(tl.int64), 1)  # rounded up
    key = last_key(source, num_columns, low, high, wanted, best, True, BLOCK)
    missing = wanted - add_up(source, num_columns, key + 1, best, True, BLOCK)
    each = tl.maximum(mass_of(value_of(key), best), 1)
    return key, tl.maximum((missing + each - 1) // each, 1)


@triton.jit
def cut_kernel(
    logits_pointer,
    top_k_pointer,
    top_p_pointer,
    gap_pointer,
    row_stride,
    num_columns,
    IS_JOINT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program cuts one row of float32, in place: what is not kept goes to -inf. Ties go by lowest id.

    top_k: int32, num_columns is off. top_p: float64, 1 is off, of the mass that top_k leaves, or of the whole row if
    IS_JOINT. gap: float32, the ln of min_p, -inf is off. A row whose best logit is not finite is left as it is.

    What is kept is what the steps keep one by one, up to the rounding of masses: whole multiples of 2**-44 here, there
    float32 that are added up in float64. So a token at the very end of a nucleus may be kept by one of the two alone.
    """
    row = tl.program_id(0).to(tl.int64)
    source = logits_pointer + row * row_stride
    best, worst, num_odd = ends_of(source, num_columns, BLOCK)
    if (num_odd > 0) | (best == float("-inf")):
        return
    high, low = ordered(best).to(tl.int64), ordered(worst).to(tl.int64)
    wanted_tokens = tl.load(top_k_pointer + row).to(tl.int64)
    floor = low  # of keys; of the tokens that have this one, `room` stay
    room = num_columns.to(tl.int64)
    if wanted_tokens < num_columns:
        floor = last_key(source, num_columns, low, high, wanted_tokens, best, False, BLOCK)
        room = wanted_tokens - add_up(source, num_columns, floor + 1, best, False, BLOCK)
    top_p = tl.load(top_p_pointer + row)
    if top_p < 1.0:
        bottom = low if IS_JOINT else floor
        inside = num_columns.to(tl.int64) if IS_JOINT else room
        edge_key, edge_room = nucleus_end(source, num_columns, bottom, inside, high, top_p, best, BLOCK)
        room = tl.where(edge_key > floor, edge_room, tl.where(edge_key == floor, tl.minimum(room, edge_room), room))
        floor = tl.maximum(floor, edge_key)
    lowest = best + tl.load(gap_pointer + row)
    num_ties = tl.zeros((), tl.int64)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_real = columns < num_columns
        x = tl.load(source + columns, mask=is_real, other=float("-inf"))
        key = ordered(x).to(tl.int64)
        is_tie = (key == floor) & is_real
        rank = num_ties + tl.cumsum(is_tie.to(tl.int32), 0).to(tl.int64)
        is_kept = ((key > floor) | (is_tie & (rank <= room))) & (x >= lowest)
        tl.store(source + columns, float("-inf"), mask=is_real & (is_kept == 0))
        num_ties += tl.sum(is_tie.to(tl.int64))
