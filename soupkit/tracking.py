"""What a run tells people: lines on the terminal and scalars in TensorBoard.

Scalars go to a writer of our own under <logdir>/soup, because Trainer closes its own before our
last event and drops what it does not know (mechanics.md 3.14). A resumed run purges the points
after its checkpoint, so that no step has two values.
"""

from __future__ import annotations

import sys
from pathlib import Path

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


class ScalarWriter:
    """TensorBoard scalars of one run under `<logdir>/soup`; open it on one rank only."""

    def __init__(self, logdir: Path, *, step: int) -> None:
        """Open the writer for a run that goes on after `step`; points after `step` of an earlier
        life are purged.
        """
        # Tags already begin with "soup/", the folder is the run's name in TensorBoard.
        self._writer = SummaryWriter(str(logdir / "soup"), purge_step=step + 1)

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

    def close(self) -> None:
        """Flush and close; no scalar can be added afterwards."""
        self._writer.close()
