"""What a run tells people: lines on the terminal; scalars, a histogram and a figure in TensorBoard.

They go to a writer of our own under <logdir>/soup, because Trainer closes its own before our last
event and drops what it does not know (mechanics.md 3.14). A resumed run purges the points after its
checkpoint, so that no step has two values. The figure needs matplotlib (extra train); without it
one line says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from torch.utils.tensorboard import SummaryWriter

SCALAR_NAMES = (
    "soup/kept_energy",
    "soup/delta_norm_before",
    "soup/delta_norm_after",
    "soup/cosine",
    "soup/seconds",
    "soup/partner_step",
    "soup/accepted",
    "soup/metric_current",
    "soup/metric_merged",
)
HISTOGRAM_NAME = "soup/kept_energy_by_matrix"
FIGURE_NAME = "soup/spectra"

MAX_CURVES = 40
_MAX_NAMED_CURVES = 10


def say(text: str) -> None:
    """One line to standard error, at once and above progress bars; standard output stays the
    caller's.
    """
    line = f"soupkit: {text}"
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None:
        tqdm.tqdm.write(line, file=sys.stderr)
    else:
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def relative_spectra(spectra: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Singular values over the largest, by name, in (0, 1]; of MAX_CURVES matrices, evenly chosen.

    Values that are 0 or not finite have no place on a log axis and are left out, and so is a matrix
    without others.
    """
    found = {}
    for name, values in spectra.items():
        positive = [value for value in values if math.isfinite(value) and value > 0]
        if positive:
            largest = max(positive)
            # A value of 1e-320 over one of 1e10 is 0 again.
            found[name] = [value / largest for value in positive if value / largest > 0]
    names = list(found)
    count = min(len(names), MAX_CURVES)
    chosen = [names[index * (len(names) - 1) // max(1, count - 1)] for index in range(count)]
    return {name: found[name] for name in chosen}


def spectra_image(spectra: Mapping[str, Sequence[float]]) -> Any:
    """The figure of spectra as pixels [height, width, 4] uint8, or None if there is none to show.

    Drawn on a canvas of its own: neither pyplot nor the process's backend is touched.

    Raises:
        ImportError: matplotlib is not installed.
    """
    curves = relative_spectra(spectra)
    if not curves:
        return None
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = colormaps["viridis"](numpy.linspace(0, 0.95, len(curves)))
    for colour, (name, values) in zip(colours, curves.items(), strict=True):
        places = range(1, len(values) + 1)
        axes.plot(places, values, color=colour, linewidth=1, marker=".", markersize=2, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("singular value kept")
    axes.set_ylabel("over the largest")
    axes.set_title(f"spectra of {len(curves)} of {sum(map(bool, spectra.values()))} matrices")
    if len(curves) <= _MAX_NAMED_CURVES:
        axes.legend(fontsize="x-small")
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())


class ScalarWriter:
    """TensorBoard events of one run under `<logdir>/soup`; open it on one rank only."""

    def __init__(self, logdir: Path, *, step: int) -> None:
        """Open the writer for a run that goes on after `step`; points after `step` of an earlier
        life are purged.
        """
        # Tags already begin with "soup/", the folder is the run's name in TensorBoard.
        self._writer = SummaryWriter(str(logdir / "soup"), purge_step=step + 1)
        self._draws = True

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Write scalars at optimizer step `step` and flush them.

        Raises:
            ValueError: a name that is not in SCALAR_NAMES.
        """
        for name, value in scalars.items():
            if name not in SCALAR_NAMES:
                raise ValueError(f"scalar {name!r}: use one of {', '.join(SCALAR_NAMES)}")
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def add_kept_energy(self, step: int, shares: Sequence[float]) -> None:
        """Write the histogram of each matrix's kept share of energy, in [0, 1], and flush it."""
        known = [min(max(share, 0.0), 1.0) for share in shares if math.isfinite(share)]
        if known:
            # A hundred equal bins: TensorFlow's, which grow by a tenth, have one for 0.92 to 1.
            bins: Any = numpy.linspace(0, 1, 101)
            self._writer.add_histogram(HISTOGRAM_NAME, numpy.asarray(known), step, bins=bins)
            self._writer.flush()

    def add_spectra(self, step: int, spectra: Mapping[str, Sequence[float]]) -> None:
        """Draw the kept singular values of each matrix, write the figure and flush it.

        Args:
            spectra: by parameter name; those without singular values (vectors) are left out.
        """
        if not self._draws:
            return
        try:
            image = spectra_image(spectra)
        except Exception as error:  # noqa: BLE001 - one rank draws; a figure must not end the run
            self._draws = False
            absent = isinstance(error, ImportError)
            remedy = "; install matplotlib (extra train) to have it" if absent else ""
            say(f"no figure of spectra in TensorBoard: {error}{remedy}")
            return
        if image is not None:
            self._writer.add_image(FIGURE_NAME, image, step, dataformats="HWC")
            self._writer.flush()

    def close(self) -> None:
        """Flush and close; no scalar can be added afterwards."""
        self._writer.close()
