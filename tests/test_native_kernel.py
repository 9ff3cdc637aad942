"""The C library of the CPU kernel: each instruction set of this machine, and how it is built."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from delta_kit import ENCODINGS, Encoding, make_delta, reference
from torch import Tensor

from soupkit_kernels import (
    DeltaArena,
    Plan,
    arena_of,
    bitpack,
    delta_linear,
    naive,
    native,
    native_path,
    path_name,
    plan_of,
    torch_path,
)

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = native.load()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIGNS: Encoding = (1, False, 0, False)
needs_library = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


@pytest.fixture(params=range(len(native.ISAS)), ids=native.ISAS)
def library(request: pytest.FixtureRequest) -> native.Library:
    if isinstance(LIBRARY, str):
        pytest.skip(LIBRARY)
    if request.param > LIBRARY.isa:
        pytest.skip(f"this machine has {native.ISAS[LIBRARY.isa]} at most")
    return dataclasses.replace(LIBRARY, isa=request.param)


class Case:
    """x, weight, deltas, index and bias of one call."""

    def __init__(
        self,
        num_rows: int,
        width: int,
        num_tokens: int,
        dtype: torch.dtype,
        encodings: tuple[Encoding | None, ...],
    ) -> None:
        generator = torch.Generator().manual_seed(num_rows + 1000 * width + num_tokens)
        self.deltas = [
            None if each is None else make_delta(num_rows, width, each, generator)
            for each in encodings
        ]
        self.arena = arena_of(self.deltas, dtype=dtype)
        self.x = torch.randn(num_tokens, width, generator=generator).to(dtype)
        self.weight = torch.randn(num_rows, width, generator=generator).mul(0.05).to(dtype)
        self.index = torch.randint(-1, len(encodings), (num_tokens,), generator=generator)
        self.bias = torch.randn(num_rows, generator=generator).to(dtype)

    def linear(self, library: native.Library) -> Tensor:
        return native_path.linear(
            library, self.x, self.weight, self.bias, self.arena, step_of(self.index, self.arena)
        )

    def add(self, library: native.Library) -> Tensor:
        y = self.x.new_ones(self.x.shape[0], self.arena.out_features)
        native_path.add(library, y, self.x, self.arena, step_of(self.index, self.arena))
        return y


def step_of(index: Tensor, arena: DeltaArena) -> Plan:
    return plan_of(index, slots=arena.slots, planes=arena.planes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [9, 77, 200, 1000])
def test_every_instruction_set_computes_what_naive_does(
    library: native.Library, width: int, dtype: torch.dtype
) -> None:
    if not library.supports(dtype):
        arena = arena_of([make_delta(1, 1, SIGNS, torch.Generator())], dtype=dtype)
        assert native_path.why_not(library, arena, None) is not None
        return
    for num_tokens in (1, 2, 3, 4, 8, 33):
        for encodings in ((SIGNS,), (SIGNS, (8, False, 0, True), None), (None, *ENCODINGS)):
            case = Case(37, width, num_tokens, dtype, encodings)
            args = (case.weight, case.deltas, case.index, case.bias)
            expected = reference(case.x, *args)
            own = (naive.delta_linear(case.x, *args).double() - expected).abs().max()
            y = case.linear(library)
            assert y.dtype == dtype
            error = float((y.double() - expected).abs().max())
            top = float(expected.abs().max())
            assert error <= max(2 * float(own), 4 * torch.finfo(dtype).eps * top)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "encoding", [(0, False, 3, False), (1, False, 2, False), (2, True, 1, False)]
)
def test_low_rank_of_many_tokens(
    library: native.Library, encoding: Encoding, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and among others, a large low rank, blocks of rows that do not divide N, with bias."""
    if not library.supports(dtype):
        pytest.skip("float16 needs AVX2")
    monkeypatch.setattr(native_path, "BLOCK_BYTES", 5 * 77 * dtype.itemsize)
    case = Case(37, 77, 90, dtype, (encoding, SIGNS, encoding, None))
    for slot in (0, 2):
        delta = case.deltas[slot]
        assert delta is not None
        assert delta.up is not None
        assert delta.down is not None
        # In the arena's dtype, as large as the base.
        up, down = (part.mul(8).to(dtype) for part in (delta.up, delta.down))
        large = case.deltas[slot] = dataclasses.replace(delta, up=up, down=down)
        case.arena.put(slot, large)
    for index in (torch.zeros(90).long(), case.index, case.index.clamp(max=0)):
        case.index = index
        for found, weight, bias in (
            (case.linear(library), case.weight, case.bias),
            (case.add(library), torch.zeros_like(case.weight), torch.ones(37)),
        ):
            expected = reference(case.x, weight, case.deltas, index, bias)
            top, eps = float(expected.abs().max()), torch.finfo(dtype).eps
            assert float((found.double() - expected).abs().max()) <= 2 * eps * top


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [9, 77, 200])
def test_every_instruction_set_adds_the_delta_alone(
    library: native.Library, width: int, dtype: torch.dtype
) -> None:
    if not library.supports(dtype):
        pytest.skip("float16 needs AVX2")
    for num_tokens in (1, 5, 21, 300):
        case = Case(37, width, num_tokens, dtype, (*ENCODINGS, None))
        nothing = torch.zeros_like(case.weight)
        expected = 1 + reference(case.x, nothing, case.deltas, case.index)
        y = case.add(library)
        # Rounded once to y's dtype; x times a column scale may be bfloat16, 2^-9 of a product.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), expected, rtol=eps, atol=2 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("planes", [1, 3])
def test_the_effective_weight_is_the_rounded_float32_sum(
    library: native.Library, planes: int, dtype: torch.dtype
) -> None:
    """Bit for bit, subnormals, infinities and NaN included; from any row on."""
    if not library.supports(dtype):
        pytest.skip("float16 needs AVX2")
    for width in (9, 77, 128):
        case = Case(11, width, 1, dtype, ((planes, False, 0, False),))
        delta, weight = case.deltas[0], case.weight
        assert delta is not None
        assert delta.packed is not None
        assert delta.scale is not None
        weight[0, :5] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-40, -0.0])
        delta.scale[:, 1] = 1e-39
        weight[1] = 0
        case.arena.put(0, delta)
        total = torch.zeros(11, width)
        for signs, alpha in zip(delta.packed, delta.scale, strict=True):
            total += alpha[:, None] * bitpack.unpack(signs, width)
        expected = (weight.float() + total).to(dtype)
        for first in (0, 4):
            out = torch.full((11 - first, width), 7.0, dtype=dtype)
            library.reconstruct(weight, case.arena, 0, out, first_row=first)
            torch.testing.assert_close(out, expected[first:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_base_and_signs_of_every_encoding_are_rounded_once(
    library: native.Library, encoding: Encoding, dtype: torch.dtype
) -> None:
    if not library.supports(dtype):
        pytest.skip("float16 needs AVX2")
    case = Case(11, 77, 1, dtype, (encoding,))
    delta = case.arena.delta(0)
    assert delta is not None
    signs = dataclasses.replace(delta, up=None, down=None)
    out = torch.full((11, 77), float("nan"), dtype=dtype)
    library.reconstruct(case.weight, case.arena, 0, out)
    exact = case.weight.double() + signs.dense(torch.float64)
    eps = torch.finfo(dtype).eps
    # Half a unit of the last place, and what float32 loses on the way.
    assert bool(((out.double() - exact).abs() <= exact.abs() * eps * 0.5 + 1e-7).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_neighbours_or_threads(
    library: native.Library, dtype: torch.dtype
) -> None:
    """Bit for bit: alone, in a batch of others' NaN and infinity, on one thread or five."""
    encodings = (SIGNS, (2, False, 0, True), (1, True, 0, False), SIGNS, None)
    case = Case(261, 77, 11, dtype, encodings)
    x, weight, arena, index = case.x, case.weight, case.arena, case.index
    plane = torch.zeros_like(index)
    inputs = x.to(library.input_dtype(dtype))
    y, signs = library.decode(x, weight, arena, index), library.signs(inputs, arena, index, plane)
    for t in range(11):
        at = slice(t, t + 1)
        assert torch.equal(library.decode(x[at], weight, arena, index[at])[0], y[t])
        alone = library.signs(inputs[at], arena, index[at], plane[at])
        assert torch.equal(alone[0], signs[t])
    dirty = x.clone()
    dirty[3], dirty[7] = float("nan"), float("inf")
    clean = torch.ones(11, dtype=torch.bool)
    clean[[3, 7]] = False
    assert torch.equal(library.decode(dirty, weight, arena, index)[clean], y[clean])
    whole = torch.empty_like(weight)
    library.reconstruct(weight, arena, 1, whole)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(library.decode(x, weight, arena, index), y)
            again = torch.empty_like(weight)
            library.reconstruct(weight, arena, 1, again)
            assert torch.equal(again, whole)
    finally:
        torch.set_num_threads(threads)


def test_scratch_is_used_again_but_never_by_two_threads(library: native.Library) -> None:
    """Layers of other sizes and dtypes in turn, four threads at once: the bits of a first call."""
    dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if library.supports(dtype)]
    shapes = [(261, 77), (37, 200), (5, 9), (300, 77)]
    cases = [Case(*shape, 64, dtype, (SIGNS,)) for dtype in dtypes for shape in shapes]
    for case in cases:
        case.index = torch.zeros(64).long()

    def calls(first: int) -> list[Tensor]:
        turned = [*cases[first:], *cases[:first]]
        found = [case.linear(library) for _ in range(20) for case in turned]
        return [found[(i - first) % len(cases)] for i in range(len(cases))] + found

    alone = [case.linear(library) for case in cases]
    for case, y in zip(cases, alone, strict=True):
        expected = reference(case.x, case.weight, case.deltas, case.index, case.bias)
        top, eps = float(expected.abs().max()), torch.finfo(y.dtype).eps
        assert float((y.double() - expected).abs().max()) <= 4 * eps * top
    with ThreadPoolExecutor(4) as pool:
        for first, found in enumerate(pool.map(calls, range(4))):
            order = [*alone[first:], *alone[:first]] * 20
            assert all(map(torch.equal, found, [*alone, *order]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plane_that_a_variant_lacks_gives_nothing(
    library: native.Library, dtype: torch.dtype
) -> None:
    """Beside one that has it, alone, and in an arena where no byte may be read for it."""
    case = Case(13, 77, 4, dtype, (SIGNS, (3, False, 0, False), None, (0, False, 2, False)))
    inputs = case.x.to(library.input_dtype(dtype))
    index = torch.tensor([0, 1, 2, 3])
    found = library.signs(inputs, case.arena, index, torch.full((4,), 2))
    assert found[[0, 2, 3]].count_nonzero() == 0
    delta = case.deltas[1]
    assert delta is not None
    assert delta.scale is not None
    assert torch.equal(found[1] != 0, delta.scale[2] != 0)
    assert library.signs(inputs[2:], case.arena, index[2:], index[:2]).eq(0).all()
    base = library.decode(case.x, case.weight, case.arena, torch.full((4,), -1))
    mixed = library.decode(case.x, case.weight, case.arena, index)
    assert torch.equal(mixed[2:], base[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_beyond_the_width_and_strides_change_nothing(
    library: native.Library, dtype: torch.dtype
) -> None:
    case = Case(13, 77, 40, dtype, ((2, False, 0, False), (1, True, 0, False)))
    y = case.linear(library)
    for slot, delta in enumerate(case.deltas):
        assert delta is not None
        assert delta.packed is not None
        garbage = delta.packed.clone()
        garbage[..., -1] |= 0xE0
        case.arena.put(slot, dataclasses.replace(delta, packed=garbage))
    tall = torch.full((26, 90), float("nan"), dtype=dtype)
    tall[::2, :77] = case.weight
    wide = torch.full((40, 154), float("nan"), dtype=dtype)
    wide[..., ::2] = case.x
    case.weight, case.x = tall[::2, :77], wide[..., ::2]
    assert torch.equal(case.linear(library), y)


@needs_library
@pytest.mark.parametrize("encodings", [(SIGNS, (2, False, 0, True), SIGNS), ENCODINGS[3:6]])
def test_the_paths_agree_on_what_goes_where(
    encodings: tuple[Encoding, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups large and small, of variants, of the base and of empty slots, against plain torch."""
    assert not isinstance(LIBRARY, str)
    monkeypatch.setattr(native_path, "BLOCK_BYTES", 5 * 40 * 4)
    case = Case(23, 40, 90, torch.float32, (*encodings, None))
    many = native_path.MANY_TOKENS[LIBRARY.isa_name(torch.float32)]
    few = many - 1
    for counts in (
        {0: many, -1: many}, {1: many, 0: few, -1: 2}, {-1: few, 2: 3}, {2: many + 1},
        {-1: few, 3: 2, 0: 1}, {-1: 2, 3: 3}, {3: many}, {0: many, 1: many, 2: few},
    ):  # fmt: skip
        index = torch.tensor([v for v, count in counts.items() for _ in range(count)])
        index = index[torch.randperm(len(index))]
        args = (case.x[: len(index)], case.weight, case.bias, case.arena)
        step = step_of(index, case.arena)
        found = native_path.linear(LIBRARY, *args, step)
        torch.testing.assert_close(found, torch_path.linear(*args, step))
        one, other = torch.ones(len(index), 23), torch.ones(len(index), 23)
        native_path.add(LIBRARY, one, args[0], case.arena, step)
        torch_path.add(other, args[0], case.arena, step)
        torch.testing.assert_close(one, other)


@needs_library
def test_the_path_is_named_with_its_reason() -> None:
    assert not isinstance(LIBRARY, str)

    def arena(dtype: torch.dtype, planes: int = 1, device: str = "cpu") -> DeltaArena:
        return DeltaArena(
            4, 8, slots=1, slot_bytes=0, planes=planes, has_columns=False, rank=0, dtype=dtype,
            device=device, is_lane=False,
        )  # fmt: skip

    single = arena(torch.float32)
    assert path_name(single) == f"native {native.ISAS[min(LIBRARY.isa, 2)]}"
    assert path_name(arena(torch.bfloat16)) == f"native {native.ISAS[LIBRARY.isa]}"
    assert "float64" in path_name(arena(torch.float64))
    assert "not contiguous" in path_name(single, torch.zeros(8, 4).T)
    assert "9 planes, more than 8" in path_name(arena(torch.float32, native.MAX_PLANES + 1))
    assert path_name(arena(torch.float32, device="meta")) == "torch: tensors on meta"


@needs_library
def test_more_planes_than_the_library_takes_go_through_torch() -> None:
    case = Case(5, 20, 3, torch.float32, ((native.MAX_PLANES + 1, False, 0, False),))
    found = delta_linear(case.x, case.weight, case.arena, case.index, case.bias)
    expected = reference(case.x, case.weight, case.deltas, case.index, case.bias)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@needs_library
def test_a_plan_without_counts_is_checked_before_any_memory_is_read() -> None:
    assert not isinstance(LIBRARY, str)
    case = Case(5, 20, 3, torch.float32, (SIGNS,))
    step = dataclasses.replace(
        step_of(case.index, case.arena), index=torch.tensor([0, 1, 0]), counts=None
    )
    with pytest.raises(ValueError, match=r"must be in -1\.\.0"):
        native_path.linear(LIBRARY, case.x, case.weight, None, case.arena, step)


# -- how it is built, each time in a process of its own --

PROBE = """
import torch
from soupkit_kernels import Delta, arena_of, delta_linear, pack, path_name
x, weight = torch.ones(2, 9), torch.zeros(3, 9)
delta = Delta(3, 9, pack(torch.ones(1, 3, 9)), torch.ones(1, 3))
arena = arena_of([delta], dtype=torch.float32)
y = delta_linear(x, weight, arena, torch.tensor([0, -1]))
assert y.tolist() == [[9.0] * 3, [0.0] * 3], y
print(path_name(arena))
"""


def probe(cache: Path, **changes: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), "XDG_CACHE_HOME": str(cache)}
    environment.pop(native.ENVIRONMENT, None)
    environment.pop("CC", None)
    return subprocess.Popen(
        [sys.executable, "-c", PROBE], env={**environment, **changes}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return out.strip(), errors


@needs_library
def test_processes_that_build_at_once_all_get_the_library(tmp_path: Path) -> None:
    (tmp_path / "soupkit" / "build-left-by-a-killed-one").mkdir(parents=True)
    results = [said(process) for process in [probe(tmp_path), probe(tmp_path)]]
    assert all(out.startswith("native ") for out, _ in results)
    assert any("building the CPU kernel" in errors for _, errors in results)
    assert len(list((tmp_path / "soupkit").glob("*.so"))) == 1
    out, errors = said(probe(tmp_path))
    assert (out.split()[0], errors) == ("native", "")


def wrong_compilers(folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Environments without a working compiler, and what is said of each."""
    yield {"PATH": str(folder)}, "no C compiler: none of cc, gcc, clang is on PATH"
    yield {"CC": "no-such-compiler -O1"}, "no C compiler: no-such-compiler of $CC is not on PATH"
    fake = folder / "killed-cc"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] || kill -9 $$\n')
    fake.chmod(0o755)
    yield {"CC": str(fake)}, "exited -9"


def test_without_a_compiler_plain_torch_computes_and_says_why(tmp_path: Path) -> None:
    for changes, reason in wrong_compilers(tmp_path):
        out, errors = said(probe(tmp_path, **changes))
        assert out.startswith("torch: ")
        assert reason in out
        assert errors.count("plain torch instead") == 1
    assert not list((tmp_path / "soupkit").glob("*"))
    (tmp_path / "file").touch()
    if shutil.which("cc"):
        assert "torch: " in said(probe(tmp_path / "file"))[0]


@needs_library
def test_the_environment_names_the_path(tmp_path: Path) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    assert said(probe(tmp_path, SOUPKIT_KERNEL="torch")) == ("torch: SOUPKIT_KERNEL=torch", "")
    assert said(probe(cache, SOUPKIT_KERNEL="portable"))[0] == "native portable"
    wrong = probe(tmp_path, SOUPKIT_KERNEL="fast")
    assert "SOUPKIT_KERNEL=fast: must be torch or one of portable" in wrong.communicate()[1]
