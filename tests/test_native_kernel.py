"""The C library of the CPU kernel: each instruction set of this machine, and how it is built."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from soupkit_kernels import bitpack, cpu, fused, naive, native, path_name

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = native.load()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_library = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


@pytest.fixture(params=range(len(native.ISAS)), ids=native.ISAS)
def library(request: pytest.FixtureRequest) -> native.Library:
    if isinstance(LIBRARY, str):
        pytest.skip(LIBRARY)
    if request.param > LIBRARY.isa:
        pytest.skip(f"this machine has {native.ISAS[LIBRARY.isa]} at most")
    return dataclasses.replace(LIBRARY, isa=request.param)


def arguments(
    num_rows: int, width: int, num_tokens: int, dtype: torch.dtype, planes: tuple[int, ...]
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor]:
    """x, weight, packed, scale, variant_index, bias; scales of both signs, some of them 0."""
    generator = torch.Generator().manual_seed(num_rows + 1000 * width + num_tokens)
    packed, scale = [], []
    for variant, count in enumerate(planes):
        packed.append(bitpack.pack(torch.randn(count, num_rows, width, generator=generator)))
        alpha = torch.randn(count, 1 if variant % 2 else num_rows, generator=generator) * 0.01
        scale.append(torch.where(torch.rand(alpha.shape, generator=generator) < 0.1, 0.0, alpha))
    return (
        torch.randn(num_tokens, width, generator=generator).to(dtype),
        torch.randn(num_rows, width, generator=generator).mul(0.05).to(dtype),
        packed,
        scale,
        torch.randint(-1, len(planes), (num_tokens,), generator=generator),
        torch.randn(num_rows, generator=generator).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [9, 77, 200, 1000])
def test_every_instruction_set_computes_what_naive_does(
    library: native.Library, width: int, dtype: torch.dtype
) -> None:
    if not library.supports(dtype):
        assert fused.why_not(library, torch.zeros(1, 1, dtype=dtype), []) is not None
        return
    for num_tokens in (0, 1, 2, 3, 4, 8, 33):
        for planes in ((1,), (1, 1, 2, 4)):
            x, weight, packed, scale, index, bias = arguments(37, width, num_tokens, dtype, planes)
            wide = (x.double(), weight.double(), packed, scale, index, bias.double())
            expected = naive.delta_linear(*wide)
            yardstick = naive.delta_linear(x, weight, packed, scale, index, bias)
            y = fused.fused_delta_linear(library, x, weight, packed, scale, index, bias)
            assert y.dtype == dtype
            error = (y.double() - expected).abs()
            allowed = 2 * (yardstick.double() - expected).abs().max() if num_tokens else 0
            top = float(expected.abs().max()) if num_tokens else 0.0
            assert bool((error <= max(float(allowed), 4 * torch.finfo(dtype).eps * top)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("planes", [1, 3])
def test_the_effective_weight_is_the_rounded_float32_sum(
    library: native.Library, planes: int, dtype: torch.dtype
) -> None:
    """Bit for bit, subnormals, infinities and NaN included."""
    if not library.supports(dtype):
        pytest.skip("float16 needs AVX2")
    for width in (9, 77, 128):
        _, weight, packed, scale, _, _ = arguments(11, width, 1, dtype, (planes,))
        weight[0, :5] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-40, -0.0])
        scale[0][:, 1] = 1e-39
        weight[1] = 0
        delta = torch.zeros(11, width)
        for signs, alpha in zip(packed[0], scale[0], strict=True):
            delta += alpha[:, None] * bitpack.unpack(signs, width)
        out = torch.full((11, width), 7.0, dtype=dtype)
        library.reconstruct(weight, packed[0], scale[0], out)
        torch.testing.assert_close(
            out, (weight.float() + delta).to(dtype), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_neighbours_or_threads(
    library: native.Library, dtype: torch.dtype
) -> None:
    """Bit for bit: alone, in a batch of others' NaN and infinity, on one thread or five."""
    x, weight, packed, scale, index, _ = arguments(261, 77, 11, dtype, (1, 2, 1))
    y = library.decode(x, weight, packed, scale, index)
    for t in range(11):
        alone = library.decode(x[t : t + 1], weight, packed, scale, index[t : t + 1])
        assert torch.equal(alone[0], y[t])
    dirty = x.clone()
    dirty[3], dirty[7] = float("nan"), float("inf")
    clean = torch.ones(11, dtype=torch.bool)
    clean[[3, 7]] = False
    assert torch.equal(library.decode(dirty, weight, packed, scale, index)[clean], y[clean])
    whole = torch.empty_like(weight)
    library.reconstruct(weight, packed[1], scale[1], whole)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(library.decode(x, weight, packed, scale, index), y)
            again = torch.empty_like(weight)
            library.reconstruct(weight, packed[1], scale[1], again)
            assert torch.equal(again, whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_beyond_the_width_and_strides_change_nothing(
    library: native.Library, dtype: torch.dtype
) -> None:
    x, weight, packed, scale, index, bias = arguments(13, 77, 40, dtype, (2, 1))
    y = fused.fused_delta_linear(library, x, weight, packed, scale, index, bias)
    garbage = [signs.clone() for signs in packed]
    for signs in garbage:
        signs[..., -1] |= 0xE0
    tall = torch.full((26, 90), float("nan"), dtype=dtype)
    tall[::2, :77] = weight
    wide = torch.full((2, 20, 154), float("nan"), dtype=dtype)
    wide[..., ::2] = x.view(2, 20, 77)
    apart = [garbage[0].transpose(1, 2).contiguous().transpose(1, 2), garbage[1]]
    again = fused.fused_delta_linear(
        library, wide[..., ::2], tall[::2, :77], apart, scale, index.view(2, 20), bias
    )
    assert torch.equal(again.flatten(0, 1), y)


@needs_library
def test_the_paths_agree_on_what_goes_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups large and small, of variants and of the base, against plain torch."""
    assert not isinstance(LIBRARY, str)
    monkeypatch.setattr(fused, "BLOCK_BYTES", 5 * 40 * 4)
    x, weight, packed, scale, _, bias = arguments(23, 40, 60, torch.float32, (1, 2, 1))
    many = fused.MANY_TOKENS[LIBRARY.isa_name(torch.float32)]
    few = many - 1
    for counts in ({0: many, -1: many}, {1: many, 0: few, -1: 2}, {-1: few, 2: 3}, {2: many + 1}):
        index = torch.tensor([v for v, count in counts.items() for _ in range(count)])
        index = index[torch.randperm(len(index))]
        args = (x[: len(index)], weight, packed, scale, index, bias)
        torch.testing.assert_close(
            fused.fused_delta_linear(LIBRARY, *args), cpu.torch_delta_linear(*args)
        )


@needs_library
def test_the_path_is_named_with_its_reason() -> None:
    assert not isinstance(LIBRARY, str)
    assert path_name(torch.zeros(4, 8)) == f"native {native.ISAS[min(LIBRARY.isa, 2)]}"
    assert path_name(torch.zeros(4, 8).bfloat16()) == f"native {native.ISAS[LIBRARY.isa]}"
    assert "float64" in path_name(torch.zeros(4, 8).double())
    assert "not contiguous" in path_name(torch.zeros(8, 4).T)
    planes = torch.zeros(native.MAX_PLANES + 1, 4, 1, dtype=torch.uint8)
    assert "9 planes, more than 8" in path_name(torch.zeros(4, 8), [planes])
    assert path_name(torch.zeros(4, 8, device="meta")) == "torch: tensors on meta"


# -- how it is built, each time in a process of its own --

PROBE = """
import torch
from soupkit_kernels import delta_linear, pack, path_name
x, weight = torch.ones(2, 9), torch.zeros(3, 9)
y = delta_linear(x, weight, [pack(torch.ones(1, 3, 9))], [torch.ones(1, 3)], torch.tensor([0, -1]))
assert y.tolist() == [[9.0] * 3, [0.0] * 3], y
print(path_name(weight))
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
