"""The public layers through the Triton path: groups, long runs, a plan that the device makes."""

import dataclasses

import pytest

pytest.importorskip("triton")

import torch
from delta_kit import ENCODINGS, make_delta, reference
from torch import Tensor
from triton_bfloat16 import DEVICE

from soupkit_kernels import (
    Delta,
    add_delta_,
    arena_of,
    delta_embedding,
    delta_linear,
    path_name,
    plan_of,
)
from soupkit_kernels.arena import DeltaArena
from soupkit_kernels.plan import Plan, device_plan

N, K = 37, 144
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


def layer(dtype: torch.dtype) -> tuple[Tensor, list[Delta | None], DeltaArena, Tensor]:
    """A weight, deltas of every encoding and an empty slot, their arena, a bias."""
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(N, K, generator=generator) * 0.05).to(dtype)
    deltas: list[Delta | None] = []
    for encoding in ENCODINGS:
        made = make_delta(N, K, encoding, generator)
        if made.up is not None and made.down is not None:
            # What the arena holds: one rounding less to allow for.
            made = dataclasses.replace(
                made, up=made.up.to(dtype).float(), down=made.down.to(dtype).float()
            )
        deltas.append(made)
    deltas.insert(2, None)
    arena = arena_of(deltas, dtype=dtype, device=DEVICE, is_lane=True)
    return weight, deltas, arena, torch.randn(N, generator=generator).to(dtype)


def tokens(dtype: torch.dtype, *lead: int, slots: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lead))
    x = torch.randn(*lead, K, generator=generator).to(dtype)
    return x, torch.randint(-1, slots, lead, generator=generator)


def assert_close(y: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The result is rounded once; beside that, column scales and long runs' weights are."""
    assert y.dtype == dtype
    error = (y.double().cpu() - expected).abs().max()
    assert error <= 4 * EPSILON[dtype] * expected.abs().max(), error


@pytest.mark.parametrize(
    ("lead", "dtype"),
    [((0,), torch.bfloat16), ((70,), torch.bfloat16), *(((2, 3), dtype) for dtype in EPSILON)],
)
def test_every_encoding_in_one_batch(lead: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, deltas, arena, bias = layer(dtype)
    x, index = tokens(dtype, *lead, slots=len(deltas))
    assert path_name(arena) == "triton"
    y = delta_linear(x.to(DEVICE), weight.to(DEVICE), arena, index.to(DEVICE), bias.to(DEVICE))
    assert y.shape == (*lead, N)
    if x.numel():
        assert_close(y, reference(x, weight, deltas, index, bias), dtype)


@pytest.mark.parametrize("is_whole", [True, False])
def test_many_tokens_of_a_variant_take_its_effective_weight(
    monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    monkeypatch.setattr("soupkit_kernels.plan.LONG_TOKENS", 6)
    monkeypatch.setattr("soupkit_kernels.plan.LONG_BASE_TOKENS", 4)
    weight, deltas, arena, bias = layer(torch.float32)
    slots = len(deltas)
    for variant in (-1, *range(slots)) if is_whole else (-1, 2, 8):
        index = torch.tensor([variant] * 6 + ([] if is_whole else [-1, 4, 1, 4]))
        x, _ = tokens(torch.float32, len(index), slots=slots)
        step = plan_of(index, slots=slots, planes=arena.planes, device=DEVICE, is_lane=True)
        assert variant in [part.variant for part in step.long]
        assert (step.groups is None) == is_whole
        y = delta_linear(x.to(DEVICE), weight.to(DEVICE), arena, step, bias.to(DEVICE))
        assert_close(y, reference(x, weight, deltas, index, bias), torch.float32)
        y = torch.ones(len(index), N, device=DEVICE)
        add_delta_(y, x.to(DEVICE), arena, step)
        nothing = torch.zeros_like(weight)
        assert_close(y, reference(x, nothing, deltas, index) + 1, torch.float32)
    step = plan_of(torch.tensor([1] * 6), slots=slots, planes=arena.planes, is_lane=True)
    turned = weight.T.contiguous().T
    x, _ = tokens(torch.float32, 6, slots=slots)
    assert_close(
        delta_linear(x.to(DEVICE), turned.to(DEVICE), arena, step),
        reference(x, weight, deltas, torch.tensor([1] * 6)),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", list(EPSILON))
def test_the_delta_alone_is_added_to_what_a_quantised_base_gave(dtype: torch.dtype) -> None:
    weight, deltas, arena, _ = layer(dtype)
    x, index = tokens(dtype, 9, slots=len(deltas))
    y = torch.randn(9, N, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = y.double() + reference(x, torch.zeros_like(weight), deltas, index)
    given = y.to(DEVICE)
    assert add_delta_(given, x.to(DEVICE), arena, index.to(DEVICE)) is given
    assert_close(given, expected, dtype)
    assert torch.equal(given[index == -1].cpu(), y[index == -1])


def test_embedding_rows_follow_their_variant() -> None:
    weight, deltas, arena, _ = layer(torch.float32)
    ids = torch.tensor([[0, 36, 7], [7, 1, 2]])
    index = torch.tensor([[0, -1, 3], [4, 2, 8]])
    rows = delta_embedding(ids.to(DEVICE), weight.to(DEVICE), arena, index.to(DEVICE))
    for at in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        whole = reference(torch.eye(K), weight, deltas, index[at].expand(K))
        assert_close(rows[at], whole[:, ids[at]], torch.float32)


def test_a_plan_made_on_the_device_gives_the_same_rows() -> None:
    """And what is out of range becomes NaN in its own row, for nobody waits for the device."""
    weight, deltas, arena, _ = layer(torch.float32)
    x, index = tokens(torch.float32, 12, slots=len(deltas))
    exact = delta_linear(
        x.to(DEVICE),
        weight.to(DEVICE),
        arena,
        plan_of(index, slots=arena.slots, planes=arena.planes, device=DEVICE, is_lane=True),
    )

    def on_device(index: Tensor) -> Plan:
        flat = index.to(DEVICE)
        return device_plan(flat, slots=arena.slots, planes=arena.planes, device=DEVICE)

    step = on_device(index)
    assert torch.equal(delta_linear(x.to(DEVICE), weight.to(DEVICE), arena, step), exact)
    broken = index.clone()
    broken[3], broken[7] = len(deltas), -2
    y = delta_linear(x.to(DEVICE), weight.to(DEVICE), arena, on_device(broken))
    is_broken = torch.zeros(12, dtype=torch.bool)
    is_broken[[3, 7]] = True
    assert torch.equal(y.isnan().all(dim=1).cpu(), is_broken)
    assert torch.equal(y[~is_broken], exact[~is_broken])


def test_another_variant_in_a_slot_changes_no_shape_and_leaves_nothing_behind() -> None:
    weight, deltas, arena, _ = layer(torch.float32)
    x, _ = tokens(torch.float32, 3, slots=1)
    index = torch.tensor([7, 8, 8])
    step = plan_of(index, slots=arena.slots, planes=arena.planes, device=DEVICE, is_lane=True)
    address = arena.data.data_ptr(), arena.table.data_ptr()
    for held in (deltas[0], deltas[4], None, deltas[5]):
        if held is None:
            arena.clear(8)
        else:
            arena.put(8, held)
        now = [*deltas[:8], held]
        y = delta_linear(x.to(DEVICE), weight.to(DEVICE), arena, step)
        assert_close(y, reference(x, weight, now, index), torch.float32)
    assert (arena.data.data_ptr(), arena.table.data_ptr()) == address


def test_bias_and_weights_of_other_strides_are_read_right() -> None:
    weight, deltas, arena, bias = layer(torch.float32)
    x, index = tokens(torch.float32, 5, slots=len(deltas))
    turned = weight.T.contiguous().T.to(DEVICE)
    for given in (bias.repeat_interleave(2).to(DEVICE)[::2], bias[:1].to(DEVICE).expand(N)):
        y = delta_linear(x.to(DEVICE), turned, arena, index.to(DEVICE), given)
        assert_close(y, reference(x, weight, deltas, index, given.cpu()), torch.float32)
    ids = torch.tensor([0, 36, 7, 7, 1], device=DEVICE)
    rows = delta_embedding(ids, turned, arena, index.to(DEVICE))
    assert torch.equal(rows, delta_embedding(ids, weight.to(DEVICE), arena, index.to(DEVICE)))


def test_out_of_range_of_the_plan_is_nan_in_an_arena_of_more_slots() -> None:
    weight, _, arena, _ = layer(torch.float32)
    x, _ = tokens(torch.float32, 3, slots=1)
    step = device_plan(torch.tensor([0, 5, -1], device=DEVICE), slots=4, planes=3, device=DEVICE)
    y = delta_linear(x.to(DEVICE), weight.to(DEVICE), arena, step)
    rows = delta_embedding(torch.arange(3, device=DEVICE), weight.to(DEVICE), arena, step)
    for result in (y, rows):
        assert result.isnan().any(dim=1).tolist() == [False, True, False]
        assert result[1].isnan().all()


def test_a_plan_without_groups_is_refused_where_they_are_needed() -> None:
    weight, _, arena, _ = layer(torch.float32)
    x, index = tokens(torch.float32, 3, slots=arena.slots)
    step = plan_of(index, slots=arena.slots, planes=3, device=DEVICE, is_lane=False)
    with pytest.raises(ValueError, match="is_lane=True"):
        delta_linear(x.to(DEVICE), weight.to(DEVICE), arena, step)


def test_autocast_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soupkit_kernels.plan.LONG_TOKENS", 4)
    weight, deltas, arena, bias = layer(torch.float32)
    for index in (torch.tensor([1] * 4), torch.tensor([1] * 4 + [0, -1])):
        x, _ = tokens(torch.float32, len(index), slots=1)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = delta_linear(x.to(DEVICE), weight.to(DEVICE), arena, index, bias.to(DEVICE))
            added = add_delta_(torch.zeros_like(y), x.to(DEVICE), arena, index)
        assert_close(y, reference(x, weight, deltas, index, bias), torch.float32)
        nothing = torch.zeros_like(weight)
        assert_close(added, reference(x, nothing, deltas, index), torch.float32)
