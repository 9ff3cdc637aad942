"""Promises of soupkit.gram: float64 least squares on the layer's output, never worse."""

import numpy as np
import pytest
import torch
from delta_kit import dense
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit import signs
from soupkit.encoding import Encoding, encode
from soupkit.gram import fit_scales, output_error

NAMES = ["row", "matrix", "column", "rank1", "row-x3", "matrix-x2", "column-x2", "rank1-x2"]
NAMES += ["sparse", "lowrank-2+row", "row-x2+lowrank-2"]


def draw(seed, rows, columns, *, tokens=None):
    """(delta, X) with rows, columns and inputs of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(rows, 1, generator=generator) + 0.1
    delta = torch.randn(rows, columns, generator=generator) * size * 1e-3
    delta *= torch.rand(rows, columns, generator=generator) < 0.8
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens or 3 * columns, columns, generator=generator, dtype=torch.float64)
    return delta, x @ mix


def error_of(delta, encoded, x):
    left = delta.double().numpy() - dense(encoded, tuple(delta.shape))
    return np.square(x.numpy() @ left.T).sum()


@pytest.mark.parametrize("planes", [1, 2])
def test_row_scales_equal_least_squares_of_each_row(planes):
    delta, x = draw(0, 7, 19)
    encoding = Encoding(planes=planes)
    encoded = encode(delta, encoding)
    found = fit_scales(delta.__getitem__, encoded, encoding, x.T @ x)
    bits = np.unpackbits(encoded.packed.numpy(), axis=2, count=19, bitorder="little") * 2.0 - 1
    for row in range(7):
        design = x.numpy() @ bits[:, row].T
        wanted = np.linalg.lstsq(design, x.numpy() @ delta[row].double().numpy(), rcond=None)[0]
        np.testing.assert_allclose(found.scale[:, row].numpy(), wanted, rtol=1e-5)


def test_a_matrix_scale_and_column_scales_equal_least_squares():
    delta, x = draw(1, 9, 6)
    true = (x @ delta.double().T).numpy()
    for name in ("matrix", "column"):
        encoded = encode(delta, Encoding.parse(name))
        found = fit_scales(delta.__getitem__, encoded, Encoding.parse(name), x.T @ x)
        signs = np.unpackbits(encoded.packed[0].numpy(), axis=1, count=6, bitorder="little")
        signs = signs * 2.0 - 1
        if name == "matrix":
            design = (x.numpy() @ signs.T).reshape(-1, 1)
        else:
            design = np.stack([np.outer(x[:, k], signs[:, k]).ravel() for k in range(6)], 1)
        wanted = np.linalg.lstsq(design, true.ravel(), rcond=None)[0]
        columns = 1.0 if found.column_scale is None else found.column_scale[0].numpy()
        np.testing.assert_allclose(found.scale[0].numpy() * columns, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", ["row", "matrix", "column", "sparse"])
def test_with_the_identity_it_is_the_mean_rule(name):
    delta, _ = draw(2, 8, 21)
    encoding = Encoding.parse(name)
    encoded = encode(delta, encoding)
    found = fit_scales(delta.__getitem__, encoded, encoding, torch.eye(21, dtype=torch.float64))
    torch.testing.assert_close(found.scale, encoded.scale, rtol=1e-6, atol=0.0)
    if encoded.column_scale is not None:
        torch.testing.assert_close(found.column_scale, encoded.column_scale, rtol=1e-6, atol=0.0)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 99),
    rows=st.integers(1, 9),
    columns=st.integers(1, 20),
    tokens=st.integers(1, 30),
)
def test_the_output_error_never_grows(name, seed, rows, columns, tokens):
    delta, x = draw(seed, rows, columns, tokens=tokens)
    encoding = Encoding.parse(name)
    encoded = encode(delta, encoding)
    found = fit_scales(delta.__getitem__, encoded, encoding, x.T @ x)
    start, end = error_of(delta, encoded, x), error_of(delta, found, x)
    # Scales are rounded to float32 once.
    scale = float((x @ delta.double().T).square().sum())
    assert end <= start * (1 + 1e-5) + 1e-9 * scale
    wanted = output_error(delta.__getitem__, found, x.T @ x)
    assert wanted == pytest.approx(end, rel=1e-4, abs=1e-9 * scale)
    if name == "sparse":
        assert torch.equal(found.scale[0], found.scale[1])


@pytest.mark.parametrize("name", ["row-x2", "matrix", "rank1"])
def test_blocks_of_rows_change_nothing(monkeypatch, name):
    delta, x = draw(3, 23, 10)
    encoding = Encoding.parse(name)
    encoded = encode(delta, encoding)
    whole = fit_scales(delta.__getitem__, encoded, encoding, x.T @ x)
    monkeypatch.setattr(signs, "_BLOCK_ENTRIES", 40)
    parts = fit_scales(delta.__getitem__, encoded, encoding, x.T @ x)
    torch.testing.assert_close(parts.scale, whole.scale, rtol=1e-5, atol=1e-12)


def test_zero_rows_and_inputs_that_say_nothing_stay():
    delta, x = draw(4, 5, 8)
    delta[2] = 0
    encoding = Encoding()
    encoded = encode(delta, encoding)
    found = fit_scales(delta.__getitem__, encoded, encoding, x.T @ x)
    assert float(found.scale[0, 2]) == 0.0
    nothing = torch.zeros(8, 8, dtype=torch.float64)
    kept = fit_scales(delta.__getitem__, encoded, encoding, nothing)
    assert torch.equal(kept.scale, encoded.scale)


def test_a_wrong_gram_is_refused():
    delta, _ = draw(5, 4, 8)
    with pytest.raises(ValueError, match="float64 matrix"):
        fit_scales(delta.__getitem__, encode(delta, Encoding()), Encoding(), torch.eye(8))
