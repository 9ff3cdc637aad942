"""One pass over a tensor's bytes: the same hash, and every number that is not finite is found."""

import hashlib
from pathlib import Path

import pytest
import torch

from soupkit import streaming
from soupkit.streaming import AHEAD_BYTES, PIECE_BYTES, is_finite, read_checked
from soupkit.tensorfile import Slot, TensorSpec

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).reshape(-1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_number_of_a_dtype_is_judged_as_torch_judges_it(dtype: torch.dtype) -> None:
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
    elif dtype.itemsize == 2:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        limits = torch.finfo(dtype)
        special = [0.0, -0.0, limits.max, limits.min, limits.smallest_normal / 8]
        values = torch.tensor([*special, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    assert not is_finite(as_bytes(values), dtype)
    finite = values.float().isfinite() if dtype.itemsize < 4 else values.isfinite()
    for value, good in zip(values, finite.tolist(), strict=True):
        assert is_finite(as_bytes(value.reshape(1)), dtype) is good
    assert is_finite(as_bytes(as_bytes(values).view(dtype)[finite].contiguous()), dtype)


def test_what_is_no_float_and_what_is_empty_is_finite() -> None:
    assert is_finite(torch.full((8,), 255, dtype=torch.uint8), torch.int64)
    assert is_finite(torch.empty(0, dtype=torch.uint8), torch.float32)


@pytest.mark.parametrize("place", [0, PIECE_BYTES // 4 - 1, PIECE_BYTES // 4, -1])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(tmp_path: Path, place: int) -> None:
    values = torch.randn(AHEAD_BYTES // 4 + PIECE_BYTES // 4 + 3)
    values[place] = torch.nan
    path = tmp_path / "values"
    path.write_bytes(b"header.." + values.numpy().tobytes())
    slot = Slot(TensorSpec(torch.float32, tuple(values.shape)), 8, 8 + 4 * values.numel())
    buffer = torch.zeros(4 * values.numel(), dtype=torch.uint8)
    with path.open("rb") as file:
        sha, finite = read_checked(file.fileno(), slot, buffer)
        assert read_checked(file.fileno(), slot, buffer, check=False) == ("", False)
        assert read_checked(file.fileno(), slot) == (sha, finite)
    assert not finite
    assert sha == hashlib.sha256(path.read_bytes()[8:]).hexdigest()
    assert torch.equal(buffer, as_bytes(values))


def test_no_thread_is_started_and_no_byte_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    original = streaming.read_into

    def counted(descriptor: int, piece: torch.Tensor, offset: int) -> None:
        read.append((offset, piece.numel()))
        original(descriptor, piece, offset)

    monkeypatch.setattr(streaming, "read_into", counted)
    size = 3 * PIECE_BYTES + 5
    path = tmp_path / "values"
    path.write_bytes(bytes(size))
    with path.open("rb") as file:
        slot = Slot(TensorSpec(torch.uint8, (size,)), 0, size)
        read_checked(file.fileno(), slot, torch.empty(size, dtype=torch.uint8))
    assert read == [(i * PIECE_BYTES, min(PIECE_BYTES, size - i * PIECE_BYTES)) for i in range(4)]
