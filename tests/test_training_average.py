"""The moving average: its arithmetic, wherever it lives and however weights are sharded; swapped in
and out; stored and gone on with.
"""

import errno
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training_sharded import launch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import soupkit.training.ema as ema
from soupkit.errors import TrainingError
from soupkit.training.average import Average
from soupkit.training.params import ParamStore
from soupkit.training.parts import Part, flat_part
from soupkit.training.ranks import Ranks
from soupkit.training.snapshot import Snapshot, write_tensors

ONE = Ranks(0, 1)
PLACES = ("device", "host", "disk")
SHAPES = {"a": (), "b": (7,), "c": (33, 5), "d": (1, 123), "e": (0, 3), "f": (3, 4, 5)}
# NaNs of both kinds with a payload, infinities, zeros of both signs, the least subnormal
ODD_BITS = (0x7FC0_1234, 0x7F80_0001 | 1 << 20, 0x7F80_0000, -0x0080_0000, 0, -(2**31), 1)


class Net(nn.Module):
    """Parameters of odd shapes; one is not contiguous."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=draw).to(dtype)
            self.register_parameter(name, nn.Parameter(value))
        turned = torch.randn(6, 9, generator=draw).to(dtype).t()
        self.register_parameter("turned", nn.Parameter(turned))


class TwoRanks:
    """A stand-in for a sharded run: float32 masters in uneven parts, whole bfloat16 copies.

    Each rank runs in a thread; `assemble` meets the other one.
    """

    def __init__(self, masters: dict[str, Tensor]) -> None:
        self.masters = masters
        self.barrier = Barrier(2, timeout=60)
        self.brought: list[list[Tensor]] = [[], []]

    def run(self, act):
        def guarded(rank: int):
            try:
                return act(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(2) as pool:
            return [one.result() for one in [pool.submit(guarded, rank) for rank in (0, 1)]]


class HalfStore:
    """One rank of TwoRanks, with the methods of ParamStore that the average uses."""

    is_whole = False

    def __init__(self, world: TwoRanks, rank: int) -> None:
        self.world, self.rank = world, rank
        self.names = tuple(sorted(world.masters))
        self.held = {name: self._cut(name, value, rank) for name, value in world.masters.items()}
        self.copies = {name: value.bfloat16() for name, value in world.masters.items()}

    @staticmethod
    def _cut(name: str, value: Tensor, rank: int) -> tuple[Part, ...]:
        if name == "c":  # rows, as FSDP2: 20 and 13
            rows = slice(0, 20) if rank == 0 else slice(20, None)
            return (Part(value[rows].clone(), (33, 5), (rows.start, 0)),)
        if name == "b":  # all on rank 1
            return () if rank == 0 else (flat_part(value.clone(), start=0, numel=7),)
        if name == "a":  # a replica
            return (Part(value.clone(), (), ()),)
        # two ranges of the flat weight on rank 0, the middle on rank 1, as ZeRO over a row's end
        flat, third = value.reshape(-1), value.numel() // 3
        cuts = [(0, third), (2 * third, len(flat))] if rank == 0 else [(third, 2 * third)]
        return tuple(flat_part(flat[i:j].clone(), start=i, numel=len(flat)) for i, j in cuts)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.world.masters[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def parts(self, name: str) -> tuple[Part, ...]:
        return self.held[name]

    def all_parts(self) -> list[tuple[str, tuple[Part, ...]]]:
        return [(name, self.held[name]) for name in self.names]

    def memory(self) -> list[Tensor]:
        parts = [part.data for name in self.names for part in self.held[name]]
        return [*parts, *self.copies.values()]

    def assemble(self, name, tensors, *, dtype=None) -> Tensor:
        assert all(tensor.dtype == dtype for tensor in tensors)
        self.world.brought[self.rank] = list(tensors)
        self.world.barrier.wait()
        whole = torch.zeros(self.shape(name), dtype=dtype)
        for rank, brought in enumerate(self.world.brought):
            cut = self._cut(name, self.world.masters[name], rank)
            for part, tensor in zip(cut, brought, strict=True):
                part.of(whole).copy_(tensor)
        self.world.barrier.wait()
        return whole

    def flush(self) -> None:
        for name in self.names:
            held = [part.data for part in self.held[name]]
            self.copies[name].copy_(self.assemble(name, held, dtype=torch.float32))


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(bits(one), bits(other))


def step(model: nn.Module, seed: int) -> None:
    """Change every weight, as an optimizer would: in place."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw).to(parameter.dtype)


def built(model: nn.Module, place: str = "device", folder: Path | None = None) -> Average:
    return Average(ParamStore(model), ranks=ONE, place=place, folder=folder)


def test_tb57_the_decay_grows_to_its_limit_and_the_first_update_copies() -> None:
    assert [ema.decay_of_update(0.999, n) for n in (0, 1, 9, 91)] == [0, 0.1, 0.5, 0.91]
    assert ema.decay_of_update(0.999, 8991) == 0.999
    assert ema.decay_of_update(0.999, 8990) < 0.999
    assert ema.decay_of_update(0.05, 1) == 0.05
    # What the average is made of: shares that sum to 1, the first weights forgotten.
    shares = [1.0]
    for n in range(1, 300):
        decay = ema.decay_of_update(0.999, n)
        shares = [share * decay for share in shares] + [1 - decay]
    assert sum(shares) == pytest.approx(1)
    assert shares[0] < 1e-15
    assert sum(shares[-60:]) > 0.85


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    decays=st.lists(st.floats(0, 0.9999), min_size=1, max_size=12),
    entries=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_an_update_is_that_of_a_float64_loop(shape, dtype, decays, entries, seed) -> None:
    model = nn.Module()
    draw = torch.Generator().manual_seed(seed)
    model.w = nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
    average = built(model)
    expected = model.w.detach().double().clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ema, "_ENTRIES_AT_ONCE_ON_CPU", entries)
        for number, decay in enumerate(decays):
            step(model, seed + number)
            average.update(decay)
            expected = decay * expected + (1 - decay) * model.w.detach().double()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert average.dtype("w") == average.read("w").dtype == wide
    unit = torch.finfo(wide).eps * (1 + expected.abs().max().item() if expected.numel() else 1)
    torch.testing.assert_close(
        average.read("w").double(), expected, rtol=0, atol=4 * len(decays) * unit
    )


def test_the_average_is_torchs_own() -> None:
    model = Net()
    oracle = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average = built(model)
    for number in range(25):
        step(model, number)
        oracle.update_parameters(model)
        # Its first update copies, too.
        average.update(0.9 if number else 0.0)
    for name, expected in oracle.module.named_parameters():
        torch.testing.assert_close(average.read(name), expected.data, rtol=2e-6, atol=2e-6)
    assert average.num_updates == int(oracle.n_averaged) == 25


def test_tb57_weights_that_do_not_move_are_their_own_average_exactly() -> None:
    model = Net()
    average = built(model)
    for number in range(50):
        average.update(ema.decay_of_update(0.999, number))
    for name, parameter in model.named_parameters():
        assert_same_bits(average.read(name), parameter.data)


def test_steps_too_small_for_bfloat16_are_averaged_in_float32() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    average = built(model)
    average.update(0.0)
    model.w.data.fill_(1 + 2**-7)
    average.update(0.999)
    assert average.read("w").tolist() == pytest.approx([1 + 2**-7 / 1000] * 3, rel=1e-7)
    assert average.rounded().dtype("w") == torch.bfloat16
    assert average.rounded().read("w").tolist() == [1.0] * 3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_place_gives_the_same_bits_and_touches_nothing_else(
    tmp_path, monkeypatch, place, dtype
) -> None:
    monkeypatch.setattr(ema, "_ENTRIES_AT_ONCE_ON_CPU", 11)
    model, other = Net(dtype=dtype), Net(dtype=dtype)
    average, plain = built(model, place, tmp_path), built(other)
    for number in range(12):
        step(model, number)
        step(other, number)
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        state = (torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate())
        average.update(ema.decay_of_update(0.9, number))
        assert torch.equal(state[0], torch.get_rng_state())
        assert state[1:] == (numpy.random.get_state()[1].tolist(), random.getstate())
        for name, value in model.named_parameters():
            assert_same_bits(value, weights[name])
        monkeypatch.setattr(ema, "_ENTRIES_AT_ONCE_ON_CPU", 2**18)
        plain.update(ema.decay_of_update(0.9, number))
        monkeypatch.setattr(ema, "_ENTRIES_AT_ONCE_ON_CPU", 11)
    for name in average.names:
        assert_same_bits(average.read(name), plain.read(name))
        assert_same_bits(average.rounded().tensor(name), plain.rounded().tensor(name))
        assert not average.read(name).requires_grad
    assert average.nbytes == plain.nbytes == sum(4 * p.numel() for p in model.parameters())
    # The mapped file has no name: nothing to trust or to clean up after a crash.
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_before_training_and_no_signal_in_it(tmp_path, monkeypatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left.*average-00000"):
        built(Net(), "disk", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_average_of_nothing_on_this_rank_can_live_on_disk(tmp_path) -> None:
    world = TwoRanks({"b": torch.randn(7)})
    average = Average(HalfStore(world, 0), ranks=Ranks(0, 2), place="disk", folder=tmp_path)
    average.update(0.0)
    average.update(0.5)
    assert average.nbytes == 0


def masters_at(number: int) -> dict[str, Tensor]:
    model = Net()
    for seed in range(number + 1):
        step(model, seed)
    return {name: value.detach().contiguous() for name, value in model.named_parameters()}


def two_averages(world: TwoRanks, stores: list[HalfStore], folder: Path) -> list[Average]:
    places = ("host", "disk")
    return [
        Average(store, ranks=Ranks(rank, 2), place=places[rank], folder=folder)
        for rank, store in enumerate(stores)
    ]


def train(stores: list[HalfStore], number: int) -> None:
    """Give the parts of all ranks the weights after step `number`."""
    for name, value in masters_at(number).items():
        for store in stores:
            for part in store.parts(name):
                part.data.copy_(part.of(value))
            store.copies[name].copy_(value)


def test_tb14_sharded_is_unsharded_bit_for_bit_and_resumes_at_any_number_of_ranks(
    tmp_path, monkeypatch
) -> None:
    """TB23, TB25, TB41: the stored average is of whole tensors, and has its count beside it."""
    monkeypatch.setattr(ema, "_ENTRIES_AT_ONCE_ON_CPU", 13)
    model = Net()
    plain = built(model)
    world = TwoRanks(masters_at(-1))
    stores = [HalfStore(world, rank) for rank in (0, 1)]
    halves = two_averages(world, stores, tmp_path)

    def update(number: int) -> None:
        step(model, number)
        train(stores, number)
        for average in (plain, *halves):
            average.update(ema.decay_of_update(0.95, average.num_updates))

    for number in range(6):
        update(number)
    wholes = world.run(lambda rank: {n: halves[rank].tensor(n) for n in halves[rank].names})
    for name in plain.names:
        assert_same_bits(wholes[0][name], plain.read(name))
        assert_same_bits(wholes[1][name], plain.read(name))

    write_tensors(tmp_path / "average.safetensors", plain, durable=False)
    stored = Snapshot(tmp_path / "average.safetensors")
    halves = two_averages(world, stores, tmp_path)
    for average in halves:
        average.load(stored, num_updates=plain.num_updates)
    for number in range(6, 9):
        update(number)
    wholes = world.run(lambda rank: {n: halves[rank].tensor(n) for n in halves[rank].names})
    for name in plain.names:
        assert_same_bits(wholes[1][name], plain.read(name))
    assert [average.num_updates for average in halves] == [9, 9]


@pytest.mark.parametrize("fault", ["shape", "name", "dtype"])
def test_tb23_a_stored_average_of_other_parameters_is_refused(tmp_path, fault) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(3, 2))
    average = built(model)
    average.update(0.0)
    other = nn.Module()
    shape, dtype = {"shape": (2, 3)}.get(fault, (3, 2)), {"dtype": torch.float64}.get(fault)
    other.register_parameter(
        "v" if fault == "name" else "w", nn.Parameter(torch.ones(shape, dtype=dtype))
    )
    write_tensors(tmp_path / "other.safetensors", built(other), durable=False)
    with pytest.raises(TrainingError, match="resume with the include= and exclude="):
        average.load(Snapshot(tmp_path / "other.safetensors"), num_updates=4)
    assert average.num_updates == 1
    assert average.read("w").tolist() == [[0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_tb21_tb22_tb26_tb27_swapped_puts_the_live_bits_back(error, dtype) -> None:
    model = Net(dtype=dtype)
    odd = torch.tensor(ODD_BITS, dtype=torch.int32)
    odd = odd.view(torch.float32) if dtype == torch.float32 else (odd >> 16).short().view(dtype)
    average = built(model)
    average.update(0.0)
    step(model, 1)
    model.b.data.copy_(odd)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    memory = {name: value.data_ptr() for name, value in model.named_parameters()}
    stored = {name: average.read(name).clone() for name in average.names}

    def inside() -> None:
        with average.swapped():
            for name, value in model.named_parameters():
                assert_same_bits(value.data, stored[name].to(dtype))
            if error is not None:
                raise error("in the middle")

    if error is None:
        inside()
    else:
        with pytest.raises(error):
            inside()
    for name, value in model.named_parameters():
        assert_same_bits(value.data, before[name])
        assert value.data_ptr() == memory[name]
        assert_same_bits(average.read(name), stored[name])


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_swapped_shards_and_their_low_precision_copies_go_in_and_out(tmp_path, error) -> None:
    """A rank that is interrupted alone waits for nobody."""
    world = TwoRanks(masters_at(0))
    stores = [HalfStore(world, rank) for rank in (0, 1)]
    averages = two_averages(world, stores, tmp_path)
    train(stores, 0)
    for average in averages:
        average.update(0.0)
    train(stores, 1)
    before = [[tensor.clone() for tensor in store.memory()] for store in stores]
    expected = masters_at(0)

    def score(rank: int) -> None:
        try:
            with averages[rank].swapped():
                for name, copy in stores[rank].copies.items():
                    assert_same_bits(copy, expected[name].bfloat16())
                if error is not None and rank == 1:
                    raise error
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt

    world.run(score)
    for store, tensors in zip(stores, before, strict=True):
        for live, old in zip(store.memory(), tensors, strict=True):
            assert_same_bits(live, old)


def test_tb28_an_average_without_an_update_is_not_scored() -> None:
    with pytest.raises(AssertionError, match="no update"), built(Net()).swapped():
        pass


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_a_decay_out_of_range_is_refused(decay) -> None:
    with pytest.raises(ValueError, match="0 <= decay < 1"):
        built(Net()).update(decay)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tb16_on_a_gpu_every_place_gives_the_bits_of_the_cpu(tmp_path, place, dtype) -> None:
    model, other = Net(dtype=dtype), Net(dtype=dtype).cuda()
    average, there = built(model), built(other, place, tmp_path)
    for number in range(6):
        step(model, number)
        with torch.no_grad():
            for live, value in zip(other.parameters(), model.parameters(), strict=True):
                live.copy_(value)
        for one in (average, there):
            one.update(ema.decay_of_update(0.9, number))
    for name in average.names:
        assert there.read(name).is_cuda
        assert_same_bits(there.tensor(name), average.read(name))
    with there.swapped():
        assert_same_bits(other.c.data.cpu(), average.rounded().read("c"))
    assert_same_bits(other.c.data.cpu(), model.c.data)


QUICK = ["odd/ZeRO-2 bf16", "odd/FSDP2", "odd/ZeRO-3 bf16"]
SLOW = [
    "odd/DDP",
    "odd/ZeRO-1 bf16 float32 sums",
    "odd/ZeRO-2 offload",
    "odd/ZeRO-3 whole bf16",
    "odd/ZeRO-3 offload",
    "odd/FSDP2 bf16",
    "odd/FSDP1",
    "odd/FSDP1 flat",
    "odd/ZeRO-0 bf16",
]


def found_by_two_ranks(names: list[str], folder: Path, *, timeout: float) -> dict:
    """By run and then by promise: what each rank found."""
    launch("average_runs.py", str(folder), *names, folder=folder, timeout=timeout)
    return json.loads((folder / "results.json").read_text())


def assert_all(results: dict, name: str) -> None:
    if "ZeRO" in name and "no DeepSpeed" in results:
        pytest.skip(f"DeepSpeed does not run here: {results['no DeepSpeed']}")
    assert len(results[name]) == 19
    assert {promise: seen for promise, seen in results[name].items() if seen != [True, True]} == {}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return found_by_two_ranks(QUICK, tmp_path_factory.mktemp("quick"), timeout=300)


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    return found_by_two_ranks(SLOW, tmp_path_factory.mktemp("rest"), timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_slice_tb21_tb26_under_strategies_it_is_numpys_and_training_does_not_see_it(quick, name):
    """On two ranks, in all places; stored by rank 0 and gone on with; swapped in for an evaluation
    that ends well, fails on one rank, or is interrupted on one.
    """
    assert_all(quick, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_strategy(rest, name):
    """TB21, TB26: offload, persistent ZeRO-3, every kind of master."""
    assert_all(rest, name)
