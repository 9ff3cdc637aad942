"""The fused Triton kernel against float64, unmodified under Triton's interpreter (or on CUDA)."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor
from triton_bfloat16 import DEVICE

from soupkit_kernels import configs, gpu
from soupkit_kernels.arena import DeltaArena, arena_of
from soupkit_kernels.bitpack import pack
from soupkit_kernels.delta import Delta
from soupkit_kernels.plan import Groups, groups_of

# One rounding of the result, and float32 sums of a few hundred products.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SUM_ERROR = 2.0**-20
TINY = {torch.bfloat16: 2.0**-130, torch.float16: 2.0**-24, torch.float32: 2.0**-140}


def values(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def delta_of(
    n: int, k: int, *, seed: int, planes: int = 1, has_columns: bool = False, rank: int = 0
) -> Delta:
    """Random, with values that every dtype holds: then float64 is the only reference needed."""
    generator = torch.Generator().manual_seed(seed)
    delta = Delta(n, k)
    if planes:
        signs = pack(torch.randn(planes, n, k, generator=generator))
        delta = replace(delta, packed=signs, scale=torch.randn(planes, n, generator=generator) / 8)
    if planes and has_columns:
        powers = torch.randint(-3, 1, (planes, k), generator=generator)
        delta = replace(delta, column_scale=2.0**powers)
    if rank:
        up = torch.randint(-3, 4, (n, rank), generator=generator) / 8
        down = torch.randint(-3, 4, (rank, k), generator=generator) / 8
        delta = replace(delta, up=up, down=down)
    return delta


def arena_for(deltas: list[Delta | None], dtype: torch.dtype) -> DeltaArena:
    return arena_of(deltas, dtype=dtype, device=DEVICE, is_lane=True)


def run(
    x: Tensor,
    weight: Tensor | None,
    arena: DeltaArena,
    index: list[int],
    bias: Tensor | None = None,
    y: Tensor | None = None,
) -> Tensor:
    """The launch, into NaN where it makes its own result; the locks must come back zero."""
    groups = grouped(index, arena)
    if y is None:
        assert weight is not None
        y = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=x.dtype, device=DEVICE)
    launch(x, weight, arena, groups, bias, y)
    assert not groups.locks.any()
    return y


def grouped(index: list[int], arena: DeltaArena) -> Groups:
    num_variants = len({variant for variant in index if variant >= 0})
    flat = torch.tensor(index, dtype=torch.int64, device=DEVICE)
    return groups_of(flat, num_variants=num_variants, planes=arena.planes)


def launch(
    x: Tensor, weight: Tensor | None, arena: DeltaArena, groups: Groups, bias: Tensor | None,
    y: Tensor,
) -> None:  # fmt: skip
    gpu.linear(
        x, weight, bias, arena.data, arena.table, groups,
        planes=arena.planes, has_columns=arena.has_columns, rank=arena.rank, y=y,
    )  # fmt: skip


def check(
    result: Tensor,
    x: Tensor,
    weight: Tensor | None,
    deltas: list[Delta | None],
    index: list[int],
    *added: Tensor,
) -> None:
    """result[t] == x[t] (weight + D_v)^T + added, up to one rounding and the sums' own error."""
    n, k, dtype = result.shape[1], x.shape[1], result.dtype
    nothing = torch.zeros(n, k, dtype=torch.float64)
    base = nothing if weight is None else weight.double().cpu()
    for token, variant in enumerate(index):
        delta = deltas[variant] if variant >= 0 else None
        low = signs = nothing
        if delta is not None and delta.up is not None and delta.down is not None:
            low = delta.up.double() @ delta.down.double()
        if delta is not None and delta.parts:
            signs = delta.dense(torch.float64) - low
        row = x[token].double().cpu()
        want = (base + low + signs) @ row
        # Planes may cancel in `signs`; the kernel sums each of them.
        planes = 1 if delta is None else max(1, delta.planes)
        size = (base.abs() + low.abs() + planes * signs.abs()) @ row.abs()
        for term in added:
            more = term.double().cpu().expand(len(index), n)[token]
            want, size = want + more, size + more.abs()
        error = (result[token].double().cpu() - want).abs()
        bound = ROUNDING[dtype] * want.abs() + SUM_ERROR * size + TINY[dtype]
        assert bool((error <= bound).all()), (token, variant, float((error - bound).max()))


@pytest.mark.parametrize(
    ("dtype", "n", "k", "index"),
    [
        (torch.bfloat16, 70, 256, [1, -1, 0]),
        (torch.bfloat16, 64, 264, [2, 0, 2, -1, 1, 1, 0, 2, 2, 0]),
        (torch.bfloat16, 130, 48, [-1, -1]),
        (torch.bfloat16, 65, 300, [0]),
        (torch.float16, 33, 77, [0, 0, 1]),
        (torch.float16, 9, 128, [*range(8), *range(8), -1]),
        (torch.float16, 20, 260, list(range(11))),
        (torch.float32, 45, 130, [1, -1, 0, 1]),
        (torch.float32, 33, 36, [0] * 20 + [1] * 5),
        (torch.float32, 1, 1, [0]),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_token_meets_its_own_variant(
    dtype: torch.dtype, n: int, k: int, index: list[int], has_bias: bool
) -> None:
    deltas: list[Delta | None] = [delta_of(n, k, seed=v) for v in range(max(index) + 2)]
    x, weight = values(dtype, len(index), k, seed=101), values(dtype, n, k, seed=102)
    bias = values(dtype, n, seed=103) if has_bias else None
    result = run(x, weight, arena_for(deltas, dtype), index, bias)
    check(result, x, weight, deltas, index, *([] if bias is None else [bias]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("planes", [2, 3, 4])
def test_variants_with_fewer_planes_than_the_arena(dtype: torch.dtype, planes: int) -> None:
    n, k, index = 37, 140, [3, 2, 1, 0, -1, 2, 4, 4]
    deltas: list[Delta | None] = [
        *(delta_of(n, k, seed=p, planes=p) for p in (planes, 1, planes - 1)),
        None,
        delta_of(n, k, seed=9, planes=0, rank=2),
    ]
    x, weight = values(dtype, len(index), k, seed=1), values(dtype, n, k, seed=2)
    check(run(x, weight, arena_for(deltas, dtype), index), x, weight, deltas, index)


@pytest.mark.parametrize(("tokens", "variants"), [(17, 3), (33, 2), (64, 5), (70, 2), (130, 1)])
def test_groups_of_every_size(tokens: int, variants: int) -> None:
    n, k, dtype = 12, 100, torch.bfloat16
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(-1, variants, (tokens,), generator=generator).tolist()
    deltas: list[Delta | None] = [delta_of(n, k, seed=v) for v in range(variants)]
    x, weight = values(dtype, tokens, k, seed=1), values(dtype, n, k, seed=2)
    check(run(x, weight, arena_for(deltas, dtype), index), x, weight, deltas, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [128, 150])
def test_column_scales(dtype: torch.dtype, k: int) -> None:
    n, index = 35, [0, 1, -1, 2, 0]
    deltas: list[Delta | None] = [
        delta_of(n, k, seed=0, planes=2, has_columns=True),
        delta_of(n, k, seed=1),
        delta_of(n, k, seed=2, has_columns=True),
    ]
    x, weight = values(dtype, len(index), k, seed=1), values(dtype, n, k, seed=2)
    check(run(x, weight, arena_for(deltas, dtype), index), x, weight, deltas, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("planes", [0, 1])
def test_low_rank_parts_of_different_ranks(dtype: torch.dtype, planes: int) -> None:
    n, k, index = 70, 96, [2, 0, 1, -1, 0, 1]
    deltas: list[Delta | None] = [
        delta_of(n, k, seed=v, planes=planes, rank=rank) for v, rank in enumerate((3, 0, 5))
    ]
    x, weight, bias = (values(dtype, *shape, seed=len(shape)) for shape in ((6, k), (n, k), (n,)))
    result = run(x, weight, arena_for(deltas, dtype), index, bias)
    check(result, x, weight, deltas, index, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index", [[1, -1, 0, 2, 2], [-1, -1]])
def test_signs_alone_add_to_what_is_there(dtype: torch.dtype, index: list[int]) -> None:
    n, k = 67, 200
    deltas: list[Delta | None] = [
        delta_of(n, k, seed=0),
        delta_of(n, k, seed=1, planes=2, rank=3),
        None,
    ]
    x, y = values(dtype, len(index), k, seed=1), values(dtype, len(index), n, seed=2)
    before = y.clone()
    run(x, None, arena_for(deltas, dtype), index, y=y)
    check(y, x, None, deltas, index, before)
    base = [token for token, variant in enumerate(index) if variant in (-1, 2)]
    assert torch.equal(y[base], before[base])


def test_signs_alone_reach_a_group_whose_first_member_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members keep their places when the tokens of their block are cut in two groups."""
    monkeypatch.setattr(configs, "shape", lambda *_: (16, 2))
    n, k, index = 20, 48, [0] * 16 + [1] * 3
    deltas: list[Delta | None] = [delta_of(n, k, seed=v) for v in range(2)]
    arena = arena_for(deltas, torch.float32)
    assert grouped(index, arena).members[1].tolist() == [-1, 1]
    x, y = values(torch.float32, 19, k, seed=1), values(torch.float32, 19, n, seed=2)
    before = y.clone()
    run(x, None, arena, index, y=y)
    check(y, x, None, deltas, index, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_split_sums_are_the_same_every_time(dtype: torch.dtype) -> None:
    n, k, index = 20, 1100, [0, 1, -1, 0]
    deltas: list[Delta | None] = [delta_of(n, k, seed=v, rank=2) for v in range(2)]
    arena, groups = arena_for(deltas, dtype), grouped(index, arena_for(deltas, dtype))
    x, weight, bias = (values(dtype, *shape, seed=len(shape)) for shape in ((4, k), (n, k), (n,)))
    chosen = configs.config(groups.block_m, 2, x.element_size())
    assert gpu.split(k, 1, chosen.block_k, 2 * gpu.chip(x.device)[0])[1] > 1
    results = []
    for _ in range(2):
        y = torch.full((4, n), float("nan"), dtype=dtype, device=DEVICE)
        launch(x, weight, arena, groups, bias, y)
        assert not groups.locks.any()
        results.append(y)
    assert torch.equal(*results)
    check(results[0], x, weight, deltas, index, bias)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("has_columns", [False, True])
def test_a_poisoned_token_poisons_no_other(poison: float, has_columns: bool) -> None:
    n, k, dtype, index = 33, 136, torch.bfloat16, [0, 1, -1, 1, 0, 2]
    deltas: list[Delta | None] = [
        delta_of(n, k, seed=v, rank=v, has_columns=has_columns) for v in range(3)
    ]
    x, weight = values(dtype, len(index), k, seed=1), values(dtype, n, k, seed=2)
    clean = run(x, weight, arena_for(deltas, dtype), index)
    x[1, 5] = poison
    result = run(x, weight, arena_for(deltas, dtype), index)
    others = [0, 2, 3, 4, 5]
    assert torch.equal(result[others], clean[others])
    assert not result[1].isfinite().any()


def test_a_poisoned_variant_poisons_its_own_tokens_only() -> None:
    n, k, dtype, index = 20, 64, torch.float32, [0, 1, -1, 1]
    deltas: list[Delta | None] = [delta_of(n, k, seed=v, rank=1) for v in range(2)]
    x, weight = values(dtype, len(index), k, seed=1), values(dtype, n, k, seed=2)
    clean = run(x, weight, arena_for(deltas, dtype), index)
    bad = deltas[1]
    assert bad is not None
    assert bad.scale is not None
    deltas[1] = replace(bad, scale=torch.full_like(bad.scale, float("nan")))
    result = run(x, weight, arena_for(deltas, dtype), index)
    assert torch.equal(result[[0, 2]], clean[[0, 2]])
    assert result[[1, 3]].isnan().all()


@pytest.mark.parametrize("has_base", [False, True])
def test_a_variant_without_a_slot_gives_nan(has_base: bool) -> None:
    n, k, dtype, index = 20, 40, torch.bfloat16, [0, 1, -1, 0, 1]
    deltas: list[Delta | None] = [delta_of(n, k, seed=0)]
    x, weight = values(dtype, len(index), k, seed=1), values(dtype, n, k, seed=2)
    arena = arena_for(deltas, dtype)
    y = torch.zeros(len(index), n, dtype=dtype, device=DEVICE)
    result = run(x, weight if has_base else None, arena, index, y=y)
    assert result[[1, 4]].isnan().all()
    known = [0, 2, 3]
    check(result[known], x[known], weight if has_base else None, deltas, [index[t] for t in known])


def test_views_with_other_strides() -> None:
    n, k, dtype, index = 24, 130, torch.bfloat16, [0, -1, 1]
    deltas: list[Delta | None] = [delta_of(n, k, seed=v) for v in range(2)]
    wide_x, wide_weight = values(dtype, 3, 2 * k, seed=1), values(dtype, n, k + 7, seed=2)
    x, weight = wide_x[:, k:], wide_weight[:, 3 : k + 3]
    wide_y = torch.full((3, n + 5), float("nan"), dtype=dtype, device=DEVICE)
    run(x, weight, arena_for(deltas, dtype), index, y=wide_y[:, 2 : n + 2])
    check(wide_y[:, 2 : n + 2], x, weight, deltas, index)
    assert wide_y[:, :2].isnan().all()
    assert wide_y[:, n + 2 :].isnan().all()
    turned = run(x.T.contiguous().T, weight.T.contiguous().T, arena_for(deltas, dtype), index)
    check(turned, x, weight, deltas, index)


def test_only_tokens_of_groups_are_written() -> None:
    n, k, dtype = 20, 64, torch.float32
    deltas: list[Delta | None] = [delta_of(n, k, seed=0)]
    arena = arena_for(deltas, dtype)
    groups = grouped([0, -1], arena)
    rows = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    groups = replace(groups, order=rows[groups.order.long()])
    x, weight = values(dtype, 5, k, seed=1), values(dtype, n, k, seed=2)
    y = torch.full((5, n), float("nan"), dtype=dtype, device=DEVICE)
    launch(x, weight, arena, groups, None, y)
    check(y[[3, 1]], x[[3, 1]], weight, deltas, [0, -1])
    assert y[[0, 2, 4]].isnan().all()


def test_one_hot_tokens_read_the_effective_weight() -> None:
    n, k, dtype = 18, 32, torch.float32
    deltas: list[Delta | None] = [delta_of(n, k, seed=0)]
    weight = values(dtype, n, k, seed=2)
    delta = deltas[0]
    assert delta is not None
    result = run(torch.eye(k, device=DEVICE), weight, arena_for(deltas, dtype), [0] * k)
    assert torch.equal(result.T.cpu(), weight.cpu() + delta.dense())


def test_nothing_to_do() -> None:
    deltas: list[Delta | None] = [delta_of(8, 16, seed=0)]
    weight = values(torch.float32, 8, 16, seed=0)
    assert run(weight[:0], weight, arena_for(deltas, torch.float32), []).shape == (0, 8)


@pytest.mark.parametrize("planes", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("element_size", [2, 4])
def test_every_shape_of_a_plan_is_compiled_for(planes: int, element_size: int) -> None:
    for tokens in (1, 7, 16, 17, 40, 64, 65, 1000):
        for variants in (0, 1, 2, 5, 40):
            block_m, width = configs.shape(tokens, variants, planes)
            assert width >= 1
            terms = configs.bucket(width * planes)
            assert terms <= configs.MAX_TERMS[block_m]
            chosen = configs.config(block_m, terms, element_size)
            assert chosen.block_k % 128 == 0 or 128 % chosen.block_k == 0


def test_more_planes_than_the_kernel_takes() -> None:
    with pytest.raises(ValueError, match="at most 4"):
        configs.shape(1, 1, 5)


@pytest.mark.parametrize(
    ("k", "tiles", "want"), [(4096, 64, (1024, 4)), (4096, 224, (4096, 1)), (100, 1, (128, 1))]
)
def test_splits_fill_the_gpu_and_no_more(k: int, tiles: int, want: tuple[int, int]) -> None:
    assert gpu.split(k, tiles, 128, 264) == want
