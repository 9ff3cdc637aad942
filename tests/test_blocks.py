"""Promises of soupkit.blocks: layouts, experts, what is counted as lost; no matter the blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit.blocks import encode_pair
from soupkit.encoding import Encoding, decode, encode
from soupkit.errors import MergeError

NAMES = ["row", "matrix-x2", "column", "rank1-x2", "sparse", "row-x3-refit", "lowrank-2+matrix"]
LAYOUTS = [
    ("q_proj.weight", (5, 13), (5, 13)),
    ("conv.weight", (4, 3, 2, 2), (4, 12)),
    ("conv1d.weight", (4, 3, 5), (4, 15)),
    ("depthwise.weight", (6, 1, 3, 3), (6, 9)),
    ("experts.gate_up_proj", (3, 4, 10), (12, 10)),
]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "shape", "flat"), LAYOUTS)
@pytest.mark.parametrize("encoding", ["row", "row-x2", "column", "rank1", "row+lowrank-2"])
def test_every_layout_is_its_matrix(
    name: str, shape: tuple[int, ...], flat: tuple[int, int], encoding: str
) -> None:
    delta = gaussian(*shape)
    found, energy, _ = encode_pair(name, delta, torch.zeros(shape), Encoding.parse(encoding))
    wanted = encode(delta.reshape(flat), Encoding.parse(encoding))
    assert (found.out_features, found.in_features) == flat
    assert all(map(torch.equal, found.parts, wanted.parts))
    assert energy == pytest.approx(float(delta.double().square().sum()), rel=1e-12)


@pytest.mark.parametrize("encoding", ["matrix", "matrix-x3", "matrix-x2-refit"])
def test_experts_get_a_matrix_scale_each(encoding: str) -> None:
    delta = gaussian(3, 4, 10) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    one = Encoding.parse(encoding)
    found, _, _ = encode_pair("experts.down_proj", delta, torch.zeros(delta.shape), one)
    assert found.scale is not None
    assert found.scale.shape == (one.planes, 12)
    decoded = decode(found).reshape(3, 4, 10)
    for expert in range(3):
        assert torch.equal(decoded[expert], decode(encode(delta[expert], one)))


@pytest.mark.parametrize("text", ["lowrank-2+matrix", "matrix+lowrank-2"])
def test_experts_share_one_low_rank_part(text: str) -> None:
    delta = gaussian(3, 4, 10) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    encoding = Encoding.parse(text)
    found, _, lost = encode_pair("experts.up_proj", delta, torch.zeros(delta.shape), encoding)
    assert found.rank == 2
    assert found.up is not None
    assert found.down is not None
    low = found.up @ found.down
    if encoding.low_rank_first:
        rest = (delta.reshape(12, 10) - low).reshape(3, 4, 10)
        assert found.scale is not None
        means = rest.abs().mean(dim=(1, 2)).repeat_interleave(4)
        torch.testing.assert_close(found.scale[0], means)
    plain = encode_pair(
        "experts.up_proj", delta, torch.zeros(delta.shape), Encoding(scale="matrix")
    )
    assert lost < plain[2]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(0, 2**31),
    st.sampled_from([*NAMES, "row+lowrank-3", "column-x2-refit", "lowrank-40"]),
)
def test_energies_are_those_of_the_definition(
    rows: int, columns: int, seed: int, text: str
) -> None:
    ours, theirs = gaussian(rows, columns, seed=seed), gaussian(rows, columns, seed=seed + 1)
    ours[torch.rand(ours.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = 0.25
    theirs[ours == 0.25] = 0.25
    found, energy, lost = encode_pair("w.weight", ours, theirs, Encoding.parse(text))
    delta = (ours - theirs).double().numpy()
    assert energy == pytest.approx((delta**2).sum(), rel=1e-9, abs=1e-12)
    wanted = np.square(delta - decode(found).double().numpy()).sum()
    assert lost == pytest.approx(wanted, rel=1e-4, abs=1e-5 * max(energy, 1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_factors_have_the_fine_tunes_width(dtype: torch.dtype) -> None:
    ours, theirs = gaussian(7, 9).to(dtype), torch.zeros(7, 9, dtype=dtype)
    found, _, _ = encode_pair("w.weight", ours, theirs, Encoding.parse("lowrank-2+row"))
    wanted = dtype if dtype.itemsize == 2 else torch.float32
    assert found.up is not None
    assert found.down is not None
    assert (found.up.dtype, found.down.dtype) == (wanted, wanted)


@pytest.mark.parametrize("encoding", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tb51_non_finite_is_refused_with_its_place(encoding: str, value: float) -> None:
    ours = gaussian(4, 6)
    ours[2, 5] = value
    with pytest.raises(MergeError, match=r"layer\.weight: .*\(2, 5\)"):
        encode_pair("layer.weight", ours, torch.zeros(4, 6), Encoding.parse(encoding))
