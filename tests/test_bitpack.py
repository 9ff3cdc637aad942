"""Signs to bytes and back, against numpy.packbits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit_kernels.bitpack import pack, packed_width, unpack, unpack_into

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int32)


def random_signs(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).bool()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 4), max_size=2),
    st.integers(0, 70),
    st.integers(0, 2**31),
    st.sampled_from(DTYPES),
)
def test_unpack_gives_back_what_pack_took(
    lead: list[int], num_signs: int, seed: int, dtype: torch.dtype
) -> None:
    signs = random_signs(*lead, num_signs, seed=seed)
    packed = pack(signs)
    assert packed.shape == (*lead, packed_width(num_signs))
    unpacked = unpack(packed, num_signs, dtype)
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked, (signs.int() * 2 - 1).to(dtype))
    assert torch.equal(pack(unpacked), packed)
    out = torch.full((*lead, num_signs), 7, dtype=dtype)
    assert torch.equal(unpack_into(packed, out), unpacked)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31))
def test_pack_equals_numpy_packbits(rows: int, num_signs: int, seed: int) -> None:
    values = torch.randn(rows, num_signs, generator=torch.Generator().manual_seed(seed))
    witness = np.packbits(values.numpy() >= 0, axis=1, bitorder="little")
    assert np.array_equal(pack(values).numpy(), witness)


def test_bytes_are_pinned() -> None:
    values = torch.tensor([[1.0, -1, -1, 1, -1, -1, -1, -1, 1, -1]])
    assert pack(values).tolist() == [[0b00001001, 0b00000001]]
    assert unpack(torch.tensor([[0x80]], dtype=torch.uint8), 8).tolist() == [[-1.0] * 7 + [1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_zero_and_minus_zero_are_plus_one(dtype: torch.dtype) -> None:
    assert pack(torch.tensor([0.0, -0.0, -1, 1]).to(dtype)).tolist() == [0b1011]


def test_nan_is_minus_one() -> None:
    assert pack(torch.tensor([float("nan"), 1.0])).tolist() == [0b10]


def test_pad_bits_are_written_zero_and_never_read() -> None:
    for num_signs in range(1, 17):
        packed = pack(torch.ones(3, num_signs))
        pad = -num_signs % 8
        assert int(packed[0, -1]) == (1 << (8 - pad)) - 1
        dirty = packed.clone()
        dirty[:, -1] |= (0xFF << (8 - pad)) & 0xFF
        assert torch.equal(unpack(dirty, num_signs), torch.ones(3, num_signs))


@pytest.mark.parametrize("num_signs", [8, 33])
def test_strides_and_offsets_do_not_matter(num_signs: int) -> None:
    signs = random_signs(num_signs, 11)
    assert torch.equal(pack(signs.T), pack(signs.T.contiguous()))
    shifted = random_signs(3 + 4 * num_signs)[3:].view(4, num_signs)
    assert torch.equal(pack(shifted), pack(shifted.clone()))
    packed = pack(random_signs(6, 40))
    assert torch.equal(unpack(packed[::2], 40), unpack(packed[::2].contiguous(), 40))
    assert torch.equal(unpack(packed[:, :2], 13), unpack(packed, 40)[:, :13])


def test_tables_made_in_inference_mode_work_outside() -> None:
    packed = pack(random_signs(2, 16))
    with torch.inference_mode():
        unpack(packed, 16, torch.bfloat16)
    weight = torch.ones(2, 16, dtype=torch.bfloat16, requires_grad=True)
    (weight * unpack(packed, 16, torch.bfloat16)).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, unpack(packed, 16, torch.bfloat16))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="scalar"):
        pack(torch.tensor(1.0))
    with pytest.raises(ValueError, match="uint8"):
        unpack(torch.zeros(1, 1), 8)
    with pytest.raises(ValueError, match="last axis must be 2"):
        unpack(torch.zeros(1, 1, dtype=torch.uint8), 9)
    with pytest.raises(ValueError, match="last axis must be 2"):
        unpack_into(torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 9))
