"""What is told in TensorBoard, read back from the event file by TensorBoard itself."""

import io
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from soupkit import tracking
from soupkit.tracking import (
    FIGURE_NAME,
    HISTOGRAM_NAME,
    MAX_CURVES,
    ScalarWriter,
    relative_spectra,
    spectra_image,
)

SPECTRA = {"layers.0.up": [4.0, 2.0, 1.0], "layers.1.up": [3.0], "norm": []}


def events(logdir: Path) -> EventAccumulator:
    sizes = {"histograms": 0, "images": 0, "scalars": 0}
    return EventAccumulator(str(logdir / "soup"), size_guidance=sizes).Reload()


def test_scalars_histogram_and_figure_are_read_back(tmp_path) -> None:
    writer = ScalarWriter(tmp_path, step=0)
    writer.add(20, {"soup/kept_energy": 0.75})
    writer.add_kept_energy(20, [0.5, 0.955, 0.985, 0.995, 1.0 + 1e-9, math.nan])
    writer.add_spectra(20, SPECTRA)
    writer.close()
    found = events(tmp_path)
    assert found.Tags()["scalars"] == ["soup/kept_energy"]
    (histogram,) = found.Histograms(HISTOGRAM_NAME)
    value = histogram.histogram_value
    assert (histogram.step, value.num, value.min) == (20, 5, 0.5)
    filled = {
        round(limit, 2): count
        for limit, count in zip(value.bucket_limit, value.bucket, strict=True)
        if count
    }
    # What is near 1 can be told apart.
    assert filled == {0.51: 1, 0.96: 1, 0.99: 1, 1.0: 2}
    (image,) = found.Images(FIGURE_NAME)
    pixels = numpy.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    assert image.step == 20
    assert pixels.shape == (image.height, image.width, 4) == (500, 800, 4)
    assert len(numpy.unique(pixels.reshape(-1, 4), axis=0)) > 10


def test_a_resumed_run_purges_the_figures_after_its_checkpoint(tmp_path) -> None:
    for start, steps in ((0, (10, 20)), (10, (20,))):
        writer = ScalarWriter(tmp_path, step=start)
        for step in steps:
            writer.add_kept_energy(step, [0.5])
            writer.add_spectra(step, SPECTRA)
        writer.close()
    found = events(tmp_path)
    assert [image.step for image in found.Images(FIGURE_NAME)] == [10, 20]
    assert [one.step for one in found.Histograms(HISTOGRAM_NAME)] == [10, 20]


def test_merges_without_singular_values_have_no_figure(tmp_path) -> None:
    writer = ScalarWriter(tmp_path, step=0)
    writer.add_kept_energy(1, [])
    writer.add_spectra(1, {})
    writer.add_spectra(1, {"norm": [], "zero": [0.0, 0.0], "odd": [math.nan, math.inf]})
    writer.close()
    assert events(tmp_path).Tags()["images"] == []
    assert events(tmp_path).Tags()["histograms"] == []


def test_without_matplotlib_one_line_says_so_once(tmp_path, monkeypatch, capsys) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    writer = ScalarWriter(tmp_path, step=0)
    for step in (1, 2):
        writer.add_spectra(step, SPECTRA)
        writer.add(step, {"soup/cosine": 1.0})
    writer.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("soupkit: no figure of spectra")
    assert "install matplotlib (extra train)" in line
    assert len(events(tmp_path).Scalars("soup/cosine")) == 2


def test_a_figure_that_cannot_be_drawn_does_not_end_the_run(tmp_path, monkeypatch, capsys) -> None:
    def broken(spectra: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(tracking, "spectra_image", broken)
    writer = ScalarWriter(tmp_path, step=0)
    writer.add_spectra(1, SPECTRA)
    writer.add_spectra(2, SPECTRA)
    writer.close()
    assert capsys.readouterr().err == "soupkit: no figure of spectra in TensorBoard: no font\n"


def test_drawing_leaves_pyplot_and_the_backend_alone() -> None:
    code = textwrap.dedent(
        """
        import os, sys
        os.environ["MPLBackend".upper()] = "svg"
        from soupkit.tracking import spectra_image
        assert "matplotlib" not in sys.modules
        assert spectra_image({"w": [2.0, 1.0]}).shape == (500, 800, 4)
        assert "matplotlib.pyplot" not in sys.modules
        import matplotlib
        assert matplotlib.get_backend() == "svg"
        """
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.lists(st.floats(), max_size=9),
        max_size=3 * MAX_CURVES,
    )
)
def test_curves_are_shares_of_the_largest_and_few(spectra) -> None:
    curves = relative_spectra(spectra)
    drawable = [n for n, v in spectra.items() if any(0 < x < math.inf for x in v)]
    assert len(curves) == min(len(drawable), MAX_CURVES)
    assert list(curves) == [name for name in drawable if name in curves]
    # Evenly chosen: the first and the last are among them.
    assert not drawable or {drawable[0], drawable[-1]} <= {*curves} or len(curves) == 1
    for name, values in curves.items():
        assert max(values) == 1
        assert all(0 < value <= 1 for value in values)
        assert len(values) <= len(spectra[name])


@pytest.mark.parametrize("count", [1, 10, 11, 41, 210])
def test_any_number_of_curves_is_drawn(count) -> None:
    spectra = {f"layers.{i}": [2.0**-j for j in range(1 + i % 64)] for i in range(count)}
    assert spectra_image(spectra).shape == (500, 800, 4)
