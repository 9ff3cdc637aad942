"""The fused multi-variant linear on a GPU: base and packed signs in one pass over the weight.

    y[t, n] = sum_k W[n, k] x[t, k]                                        base
            + sum_p row_v[p, n] sum_k S_v[p, n, k] column_v[p, k] x[t, k]  term, one a plane
            + sum_r up_v[n, r] low[t, r] + bias[n]                         v = variant of token t

A program owns BLOCK_N output rows, one slice of K and one group of at most BLOCK_M tokens. The
operands are swapped: weights are the first operand of the dot, so that a warp group multiplies 64
of them at once however few tokens there are, and signs go from packed words to the tensor cores
through registers alone. Every term is multiplied with all tokens of the group; the epilogue picks
the columns (tokens) that are of the term's variant. Nothing is ever multiplied by 0 to hide it: an
inf or NaN of one token stays in its row.

Signs come in LANE order (lane.py): a lane of the tensor core finds the signs of its 32 inputs of
128 in one word. A shift and one LOP3 (mask, then xor) make two 16-bit values, +-1 or +-column.

On Hopper a product of signs is asynchronous, and its signs stay in registers until it is awaited.
Left to itself Triton awaits none before the end of the loop; ptxas, out of registers, then spills
or makes each instruction of all products wait for the one before. IS_IN_TURN awaits each term's
product whole before the next signs are made: its sum is carried as int32, which Triton takes for a
use of the result. The other program of the multiprocessor computes meanwhile.

Split K: each program stores its float32 sums, then counts itself in at the lock of its (group,
tile). The last one adds the sums in the order of the splits and sets the lock back to 0; the result
does not depend on which one was last.

Legend: T tokens, K in_features, N out_features, P planes of the arena, R rank, G groups, C variants
of a group. The arena, its table and the plan are described in arena.py and plan.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton does not take a starred tuple)
from __future__ import annotations

import triton
import triton.language as tl

from soupkit_kernels import arena

# A kernel reads globals only if they are constexpr.
_WIDTH = tl.constexpr(arena.NUM_COLUMNS)
_PLANES = tl.constexpr(arena.PLANES)
_PACKED = tl.constexpr(arena.PACKED)
_SCALE = tl.constexpr(arena.SCALE)
_COLUMN = tl.constexpr(arena.COLUMN)
_RANK = tl.constexpr(arena.RANK)
_UP = tl.constexpr(arena.UP)

_TOP_BITS = tl.constexpr(-0x7FFF8000)  # 0x80008000 as int32: the sign bits of a 16-bit pair
_TOP_BIT = tl.constexpr(-0x80000000)


@triton.jit
def find_terms(members, planes, variants_per_group, TERMS: tl.constexpr):
    """The variant of each term of the group whose members start at `members` (-1: none), and its
    plane."""
    variants = ()
    planes_of = ()
    c = tl.zeros((), tl.int32)
    plane = tl.zeros((), tl.int32)
    for _ in tl.static_range(TERMS):
        variants = variants + (tl.load(members + c, mask=c < variants_per_group, other=-1),)
        planes_of = planes_of + (plane,)
        # Counted, not divided: a division takes longer than the load.
        is_last = plane + 1 == planes
        c += is_last.to(tl.int32)
        plane = tl.where(is_last, 0, plane + 1)
    return variants, planes_of


@triton.jit
def make_signs(words, k, flip, dtype: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The signs of inputs k .. k + BLOCK_K, [BLOCK_N, BLOCK_K] of dtype, from their LANE words.

    words: int32 [BLOCK_N, 4 ceil(BLOCK_K / 128)]: of whole blocks of 128, one of them if BLOCK_K is
    less. flip: the value of a 0, negated column scale or -1, as int32: a scalar, or
    [1, BLOCK_K / 2] pairs of a 16-bit dtype, or [1, BLOCK_K] of float32. A 1 gives the opposite.
    """
    BLOCKS: tl.constexpr = (BLOCK_K + 127) // 128
    STEPS: tl.constexpr = BLOCK_K // BLOCKS // 8
    shift = 15 - tl.arange(0, STEPS)
    if BLOCK_K < 128:
        shift -= k % 128 // 8
    lanes = tl.reshape(words, (BLOCK_N, BLOCKS, 4))[:, :, None, :]
    pairs = tl.reshape((lanes << shift[None, None, :, None]) & _TOP_BITS, (BLOCK_N, BLOCK_K // 2))
    if dtype == tl.float32:
        wide = tl.join(pairs << 16, pairs & _TOP_BIT)
        signs = (tl.reshape(wide, (BLOCK_N, BLOCK_K)) ^ flip).to(dtype, bitcast=True)
    else:
        pairs = pairs ^ flip
        even = pairs.to(tl.int16).to(dtype, bitcast=True)
        odd = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
        signs = tl.reshape(tl.join(even, odd), (BLOCK_N, BLOCK_K))
    return signs


@triton.jit
def open_terms(
    words, table, members, row, N, K, row_words, slots, planes, variants_per_group,
    TERMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, K_PER_WORD: tl.constexpr,
    IS_IN_TURN: tl.constexpr,
):  # fmt: skip
    """For each term: zero sums, pointers to its rows of words [BLOCK_N, 1], how many inputs it has
    (0 for an unused term: it loads nothing) and a pointer to its column scales."""
    # A level of dependent loads after the other, each of all terms at once: they take a latency
    # each. For the same reason nothing waits here for what the planes say.
    variants, planes_of = find_terms(members, planes, variants_per_group, TERMS)
    counts = ()
    starts = ()
    column_starts = ()
    for t in tl.static_range(TERMS):
        variant = variants[t]
        known = (variant >= 0) & (variant < slots)
        entry = table + variant * _WIDTH
        counts = counts + (tl.load(entry + _PLANES, mask=known, other=0),)
        starts = starts + (tl.load(entry + _PACKED, mask=known, other=0),)
        column_starts = column_starts + (tl.load(entry + _COLUMN, mask=known, other=0),)
    sums = ()
    rows = ()
    limits = ()
    columns = ()
    for t in tl.static_range(TERMS):
        plane = planes_of[t]
        # Parts of a slot begin at multiples of 128 bytes.
        signs = tl.multiple_of(starts[t] // 4, 32)
        column = tl.multiple_of(column_starts[t] // 4, 32)
        plane_row = plane.to(tl.int64) * N + row
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_IN_TURN else tl.float32),)
        rows = rows + (words + signs + plane_row[:, None] * row_words,)
        limits = limits + (tl.where(plane < counts[t], K, 0),)
        columns = columns + (words + column + plane * (row_words * 32 // K_PER_WORD),)
    return sums, rows, limits, columns


@triton.jit
def multiply(
    acc, sums, x_rows, w_rows, word_rows, limits, columns, m, count, K, split_width, flip,
    TERMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN_K: tl.constexpr,
    HAS_BASE: tl.constexpr, HAS_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The main loop: this split's products of weights and of each term's signs with the tokens."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    K_PER_WORD: tl.constexpr = 1 if dtype == tl.float32 else 2
    k_of = tl.arange(0, BLOCK_K)
    word_of = tl.arange(0, (BLOCK_K + 127) // 128 * 4)
    column_of = tl.arange(0, BLOCK_K // K_PER_WORD)
    k_first = tl.program_id(2) * split_width
    for k in range(k_first, tl.minimum(K, k_first + split_width), BLOCK_K):
        x_mask = (m < count)[None, :]
        if not IS_EVEN_K:
            x_mask = x_mask & (k + k_of < K)[:, None]
        x_tile = tl.load(x_rows + (k + k_of)[:, None], mask=x_mask, other=0.0)
        if HAS_BASE:
            if IS_EVEN_K:
                w_tile = tl.load(w_rows + (k + k_of)[None, :])
            else:
                w_mask = (k + k_of < K)[None, :]
                w_tile = tl.load(w_rows + (k + k_of)[None, :], mask=w_mask, other=0.0)
            acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
        new = ()
        for t in tl.static_range(TERMS):
            k_block = k >> 7
            # One bit that stays through the loop, where it can.
            if IS_EVEN_K:
                word_mask = (word_of * 0 < limits[t])[None, :]
            else:
                word_mask = ((k_block + word_of // 4) * 128 < limits[t])[None, :]
            tile = tl.load(word_rows[t] + (k_block * 4 + word_of)[None, :], mask=word_mask, other=0)
            minus = flip
            if HAS_COLUMNS:
                column = columns[t] + k // K_PER_WORD + column_of
                column_mask = k + column_of * K_PER_WORD < limits[t]
                minus = tl.load(column, mask=column_mask, other=0)[None, :]
            signs = make_signs(tile, k, minus, dtype, BLOCK_N, BLOCK_K)
            total = sums[t].to(tl.float32, bitcast=True)
            total = tl.dot(signs, x_tile, total, input_precision="ieee")
            new = new + (total.to(sums[t].dtype, bitcast=True),)
        sums = new
    return acc, sums


@triton.jit
def add_terms(
    acc, sums, floats, table, members, variant_of, n, N, slots, planes, variants_per_group,
    TERMS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] + row scale x sum of each term, for the tokens of its variant."""
    variants, planes_of = find_terms(members, planes, variants_per_group, TERMS)
    counts = ()
    starts = ()
    for t in tl.static_range(TERMS):
        variant = variants[t]
        known = (variant >= 0) & (variant < slots)
        counts = counts + (tl.load(table + variant * _WIDTH + _PLANES, mask=known, other=0),)
        starts = starts + (tl.load(table + variant * _WIDTH + _SCALE, mask=known, other=0),)
    for t in tl.static_range(TERMS):
        plane = planes_of[t]
        used = plane < counts[t]
        scales = floats + starts[t] // 4 + plane.to(tl.int64) * N + n
        scale = tl.load(scales, mask=n < tl.where(used, N, 0), other=0.0)
        mine = variant_of == tl.where(used, variants[t], -2)
        total = sums[t].to(tl.float32, bitcast=True)
        acc = tl.where(mine[None, :], acc + total * scale[:, None], acc)
    return acc


@triton.jit
def add_low_rank(
    acc, low, values, table, members, token, variant_of, n, N, slots, variants_per_group, rank,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] + up_v[n, :] . low[t, :] for the tokens t of each member v."""
    size: tl.constexpr = values.dtype.element_ty.primitive_bitwidth // 8
    for c in range(variants_per_group):
        variant = tl.load(members + c)
        known = (variant >= 0) & (variant < slots)
        entry = table + variant * _WIDTH
        up = values + tl.load(entry + _UP, mask=known, other=0) // size + n
        mine = (variant_of == variant) & (variant_of >= 0)
        for r in range(tl.load(entry + _RANK, mask=known, other=0).to(tl.int32)):
            left = tl.load(up, mask=n < N, other=0.0).to(tl.float32)
            right = tl.load(low + token * rank + r, mask=mine, other=0.0)
            acc = tl.where(mine[None, :], acc + left[:, None] * right[None, :], acc)
            up += N
    return acc


@triton.jit
def add_splits(acc, partials, lock, count, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Leave this program's acc at its place of partials [splits, BLOCK_M, BLOCK_N].

    Returns the sum over all splits and True in the last program to come, else acc and False.
    """
    m = tl.arange(0, BLOCK_M)[None, :]
    cell = partials + m * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    tl.store(cell + tl.program_id(2) * (BLOCK_M * BLOCK_N), acc, mask=m < count)
    # All threads' stores come before the one thread's release.
    tl.debug_barrier()
    last = tl.atomic_add(lock, 1, sem="acq_rel") == tl.num_programs(2) - 1
    if last:
        tl.store(lock, 0)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        # Four at a time: a load from L2 takes longer than all the adding.
        for split in tl.range(0, tl.num_programs(2), loop_unroll_factor=4):
            # .cg: from L2; L1 is not coherent.
            part = cell + split * (BLOCK_M * BLOCK_N)
            acc += tl.load(part, mask=m < count, other=0.0, cache_modifier=".cg")
    return acc, last


@triton.jit(
    do_not_specialize=["slots", "planes", "variants_per_group", "rank", "flip"],
    # Parts of one small tensor: their alignment changes with the number of tokens.
    do_not_specialize_on_alignment=["order", "variants", "starts", "members", "locks"],
)
def delta_linear_kernel(
    x, w, bias, y,  # [T, K], [N, K], [N], [T, N]; the last axis contiguous
    words, floats, values,  # the arena's bytes as int32, float32 and x's dtype
    table,  # int64 [slots, 7]
    low,  # float32 [T, rank]: down_v x[t]
    order, variants, starts, members,  # the plan: int32 [T], [T], [G + 1], [G, C]
    partials,  # float32 [G, tiles of N, splits, BLOCK_M, BLOCK_N]
    locks,  # int32 [>= G * tiles of N] zeros, left zero
    N, K, stride_x, stride_w, stride_y,  # strides of rows, in elements
    split_width,  # inputs of a split, a multiple of BLOCK_K
    slots, planes, variants_per_group, rank,
    flip,  # int32: -1 twice in a 16-bit dtype, once in float32; as a constant it costs a LOP3
    TERMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    IS_IN_TURN: tl.constexpr,  # a term's product is awaited before the next one's signs are made
    SPLIT_K: tl.constexpr,  # else partials and locks are None
    HAS_BASE: tl.constexpr,  # else w is None and the sum is added to what y holds
    HAS_BIAS: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_LOW_RANK: tl.constexpr,
):  # fmt: skip
    """Grid (G, tiles of N, splits): groups, the fastest axis, find a weight tile in L2."""
    dtype: tl.constexpr = x.dtype.element_ty
    K_PER_WORD: tl.constexpr = 1 if dtype == tl.float32 else 2
    group = tl.program_id(0)
    first = tl.load(starts + group)
    count = tl.load(starts + group + 1) - first
    members += group * variants_per_group
    if not HAS_BASE:
        # Nothing is added to tokens of the base: they come first, so the last tells of all.
        last_token = tl.load(variants + first + count - 1, mask=count > 0, other=-1)
        count = tl.where(last_token < 0, 0, count)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the last load the last: no mask in the loop.
    row = tl.minimum(n, N - 1).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    token = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
    row_words = tl.cdiv(K, 128) * 4
    x_rows = x + token[None, :] * stride_x
    w_rows = None
    if HAS_BASE:
        w_rows = w + row[:, None] * stride_w
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    sums, word_rows, limits, columns = open_terms(
        words, table, members, row, N, K, row_words, slots, planes, variants_per_group,
        TERMS, BLOCK_M, BLOCK_N, K_PER_WORD, IS_IN_TURN,
    )  # fmt: skip
    # Not earlier: what is loaded above would wait for it, a latency more.
    if count <= 0:
        return
    acc, sums = multiply(
        acc, sums, x_rows, w_rows, word_rows, limits, columns, m, count, K, split_width, flip,
        TERMS, BLOCK_N, BLOCK_K, IS_EVEN_K, HAS_BASE, HAS_COLUMNS,
    )  # fmt: skip
    variant_of = tl.load(variants + first + m, mask=m < count, other=-1)
    acc = add_terms(
        acc, sums, floats, table, members, variant_of, n, N, slots, planes, variants_per_group,
        TERMS,
    )  # fmt: skip
    if SPLIT_K:
        cell = group * tl.num_programs(1) + tl.program_id(1)
        place = cell.to(tl.int64) * tl.num_programs(2) * (BLOCK_N * BLOCK_M)
        acc, last = add_splits(acc, partials + place, locks + cell, count, BLOCK_N, BLOCK_M)
        if not last:
            return
    if HAS_LOW_RANK:
        acc = add_low_rank(
            acc, low, values, table, members, token, variant_of, n, N, slots, variants_per_group,
            rank,
        )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = y + token[None, :] * stride_y + n[:, None]
    inside = (n < N)[:, None] & (m < count)[None, :]
    if not HAS_BASE:
        acc += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    # A variant that the arena has no slot for.
    acc = tl.where((variant_of >= slots)[None, :], float("nan"), acc)
    tl.store(out, acc.to(dtype), mask=inside)
