"""The multi-variant linear on a CPU through the C library of native.py.

Tokens go together, where that pays:
- few of a variant: all such tokens, of any variants and of the base, in one fused pass that reads
  the weights and the bits once (`Library.decode`); column scales are multiplied into the inputs and
  meet the signs in a pass of their own (`Library.signs`), low-rank parts are two thin products;
- many of one: its base and signs summed to a weight, a block of rows at a time, and F.linear; low
  rank is two thin products here too;
- many of the base: F.linear.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit_kernels import native
from soupkit_kernels.arena import PLANES, RANK, DeltaArena
from soupkit_kernels.plan import Plan

# From so many tokens of one variant on, building its effective weight is the cheaper way. Measured
# where `soupkit bench kernel` was (README.md), one variant and four, 2048 x 2048 and 4096 x 4096.
MANY_TOKENS = {"portable": 3, "avx2": 10, "avx512": 20, "avx512_bf16": 16}
# A block of rows, the scratch of a call. Smaller ones make F.linear pack x more often: bfloat16,
# 512 tokens, 2048 x 2048, 1 / 2 / 4 / 8 MB: 1.12 / 1.10 / 1.08 / 1.06 of the base; 32 MB pays page
# faults, 1.3 at 4096 x 4096.
BLOCK_BYTES = 1 << 23

_OF_THREAD = threading.local()


def why_not(library: native.Library | str, arena: DeltaArena, weight: Tensor | None) -> str | None:
    """Why such a layer cannot go through the library; None where it can."""
    if isinstance(library, str):
        return library
    if not library.supports(arena.dtype):
        return f"{arena.dtype} on {library.isa_name(arena.dtype)}"
    if weight is not None and weight.stride(1) != 1 and weight.shape[1] > 1:
        return "the rows of the weight are not contiguous"
    if arena.planes > native.MAX_PLANES:
        return f"{arena.planes} planes, more than {native.MAX_PLANES}"
    return None


def linear(
    library: native.Library,
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
    arena: DeltaArena,
    step: Plan,
) -> Tensor:  # [T, N] in x's dtype
    """The equation of naive.py; arguments as `op.delta_linear` and `why_not` let them through."""
    counts, limit = step.tokens_by_variant(), MANY_TOKENS[library.isa_name(arena.dtype)]
    if arena.filled.isdisjoint(counts):
        return F.linear(x, weight, bias)
    if x.shape[0] < limit:
        # A decode step: nothing here may take longer than it must.
        return _few(library, x, weight, bias, arena, step.index, counts)
    changed = _changed(arena, step)
    many = [variant for variant, count in changed.items() if count >= limit]
    few = [variant for variant in changed if variant not in many]
    num_plain = x.shape[0] - sum(changed.values())
    if not many and num_plain < limit:
        return _few(library, x, weight, bias, arena, step.index, few)
    if many and changed[many[0]] == x.shape[0]:
        return _many(library, x, weight, bias, arena, many[0])
    y = x.new_empty(x.shape[0], arena.out_features)
    rest = torch.ones_like(step.index, dtype=torch.bool)
    for variant in many:
        is_its = step.index == variant
        rest &= ~is_its
        rows = is_its.nonzero().squeeze(1)
        y[rows] = _many(library, x[rows], weight, bias, arena, variant)
    if num_plain >= limit:
        is_changed = torch.isin(step.index, torch.tensor(list(changed)))
        rows = (~is_changed).nonzero().squeeze(1)
        y[rows] = F.linear(x[rows], weight, bias)
        rest &= is_changed
    rows = rest.nonzero().squeeze(1)
    if rows.numel():
        y[rows] = _few(library, x[rows], weight, bias, arena, step.index[rows], few)
    return y


def add(library: native.Library, y: Tensor, x: Tensor, arena: DeltaArena, step: Plan) -> None:
    """y[t] += x[t] D_v^T, summed in float32, rounded once; tokens of the base keep theirs.

    Args:
        y: [T, N] contiguous, in x's dtype. x: [T, K].
    """
    changed = _changed(arena, step)
    limit = MANY_TOKENS[library.isa_name(arena.dtype)]
    few = [variant for variant, count in changed.items() if count < limit]
    if few:
        rows = torch.isin(step.index, torch.tensor(few)).nonzero().squeeze(1)
        part, total = x[rows], y[rows].float()
        _add_signs(library, total, part, arena, step.index[rows], few)
        _add_low_rank(total, part, arena, step.index[rows], few)
        y[rows] = total.to(y.dtype)
    # bfloat16 where its products are fast: a rounded D, and D x, lose far less than a rounded y.
    dtype = library.input_dtype(arena.dtype)
    nothing = torch.zeros(1, arena.in_features, dtype=dtype).expand(arena.out_features, -1)
    for variant in changed.keys() - set(few):
        rows = (step.index == variant).nonzero().squeeze(1)
        part, total = x[rows], y[rows].float()
        if arena.row(variant)[PLANES]:
            for at, block in _with_signs(library, nothing, arena, variant):
                total[:, at] += F.linear(part.to(dtype), block)
        if arena.row(variant)[RANK]:
            total.addmm_(*_low_rank(part, arena, variant))
        y[rows] = total.to(y.dtype)


def _changed(arena: DeltaArena, step: Plan) -> dict[int, int]:
    """Tokens of each variant that has something here."""
    counts = step.tokens_by_variant()
    return {v: n for v, n in counts.items() if v >= 0 and not arena.is_empty(v)}


def _few(
    library: native.Library,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arena: DeltaArena,
    index: Tensor,
    variants: Iterable[int],
) -> Tensor:
    """All tokens in one pass over the weights; variants: those in index."""
    y = library.decode(x, weight, arena, index)
    if arena.with_columns:
        _add_signs(library, y, x, arena, index, sorted(arena.with_columns.intersection(variants)))
    if arena.with_rank:
        _add_low_rank(y, x, arena, index, sorted(arena.with_rank.intersection(variants)))
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def _add_signs(
    library: native.Library,
    y: Tensor,  # [T, N] float32
    x: Tensor,  # [T, K]
    arena: DeltaArena,
    index: Tensor,
    variants: Iterable[int],
) -> None:
    """y += the signs of these variants, column scales included, for their tokens.

    A column scale is multiplied into x, so each plane of a variant has inputs of its own.
    """
    inputs: list[Tensor] = []
    items: list[tuple[int, int, Tensor]] = []
    for variant in variants:
        if not arena.row(variant)[PLANES]:
            continue
        delta = arena.delta(variant)
        assert delta is not None
        rows = (index == variant).nonzero().squeeze(1)
        for plane in range(delta.planes):
            part = x[rows]
            if delta.column_scale is not None:
                part = part.float() * delta.column_scale[plane]
            inputs.append(part.to(library.input_dtype(arena.dtype)))
            items.append((variant, plane, rows))
    if items:
        sizes = torch.tensor([rows.numel() for _, _, rows in items])
        slots = torch.tensor([variant for variant, _, _ in items]).repeat_interleave(sizes)
        planes = torch.tensor([plane for _, plane, _ in items]).repeat_interleave(sizes)
        part = library.signs(torch.cat(inputs), arena, slots, planes)
        y.index_add_(0, torch.cat([rows for _, _, rows in items]), part)


def _add_low_rank(
    y: Tensor, x: Tensor, arena: DeltaArena, index: Tensor, variants: Iterable[int]
) -> None:
    """y += up (down x) for the tokens of these variants, in float32."""
    for variant in variants:
        if arena.row(variant)[RANK]:
            rows = (index == variant).nonzero().squeeze(1)
            y[rows] += torch.mm(*_low_rank(x[rows], arena, variant))


def _low_rank(x: Tensor, arena: DeltaArena, variant: int) -> tuple[Tensor, Tensor]:
    """down x [T, R] and up transposed [R, N] of a variant that has them, in float32."""
    delta = arena.delta(variant)
    assert delta is not None
    assert delta.up is not None
    assert delta.down is not None
    return F.linear(x.float(), delta.down.float()), delta.up.T.float()


def _many(
    library: native.Library,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arena: DeltaArena,
    variant: int,
) -> Tensor:
    """Many tokens of one variant that is not empty; low rank is added in float32."""
    row = arena.row(variant)
    low_rank = _low_rank(x, arena, variant) if row[RANK] else None
    whole = [(slice(0, arena.out_features), weight)]
    products: list[Tensor] = []
    for rows, block in _with_signs(library, weight, arena, variant) if row[PLANES] else whole:
        product = F.linear(x, block, None if bias is None else bias[rows])
        if low_rank is not None:
            product = product.float().addmm_(low_rank[0], low_rank[1][:, rows]).to(x.dtype)
        products.append(product)
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """Memory for so many numbers that this thread uses again for each weight that it builds: new
    pages would take longer to come than to be filled.
    """
    found: Tensor | None = getattr(_OF_THREAD, "scratch", None)
    if found is None or found.numel() < count * dtype.itemsize:
        found = _OF_THREAD.scratch = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
    return found[: count * dtype.itemsize].view(dtype)


def _with_signs(
    library: native.Library, weight: Tensor, arena: DeltaArena, variant: int
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of weight + signs in the weight's dtype; each is gone as the next is made."""
    num_rows, width = weight.shape
    step = min(num_rows, max(1, BLOCK_BYTES // max(1, width * weight.itemsize)))
    scratch = _scratch(step * width, weight.dtype).view(step, width)
    for at in range(0, num_rows, step):
        rows = slice(at, min(at + step, num_rows))
        block = scratch[: rows.stop - at]
        library.reconstruct(weight, arena, variant, block, first_row=at)
        yield rows, block
