"""What a user chooses: frozen settings that check themselves.

No files and no torch here, so that `import soupkit` stays light. Every refusal is a ValueError that
names the value, the limit and the remedy.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from soupkit.checks import MAX_BUDGET
from soupkit.checks import check_choice as check_choice
from soupkit.checks import check_count as check_count
from soupkit.forms import AUTO, parse_encoding

Method = Literal["svd_mean", "monosoup", "mean"]
# Of a run: what merges two sets of weights, or averages all of them.
RunMethod = Literal["svd_mean", "monosoup", "mean", "ema"]
Gate = Literal["metric", "none"]
OptimizerState = Literal["keep", "reset"]
Place = Literal["device", "host", "disk"]
Undo = Literal["disk", "memory"]

DEFAULT_RANK = 64
BASE_NAME = "base"
_ONLY_EMA_USES = ("ema_decay", "ema_every_n_steps", "ema_place")
# Settings that a method does not look at.
_IGNORED: dict[str, tuple[str, ...]] = {
    "svd_mean": _ONLY_EMA_USES,
    "monosoup": ("rank", *_ONLY_EMA_USES),
    "mean": ("rank", "energy", *_ONLY_EMA_USES),
    "ema": ("rank", "energy", "weight", "optimizer_state"),
}

_VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_variant_name(name: str, what: str = "variant name") -> str:
    """Return `name` if it may name a variant, its folder and a model; ValueError otherwise.

    Args:
        what: that the name is of, for the message.
    """
    if not isinstance(name, str) or not _VARIANT_NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r}: needs 1 to 128 characters, a letter or digit first, then "
            "letters, digits, '.', '_' or '-'; choose another name"
        )
    if name == BASE_NAME:
        raise ValueError(f"{what} {name!r} is kept for the base model; choose another name")
    return name


def check_share(field: str, value: object, *, one_allowed: bool) -> None:
    """Raise ValueError unless `value` is a number in (0, 1), or (0, 1] where `one_allowed`."""
    limit = "0 < value <= 1" if one_allowed else "0 < value < 1"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{field}={value!r}: needs a finite number with {limit}")
    if value <= 0 or value > 1 or (value == 1 and not one_allowed):
        raise ValueError(f"{field}={value}: must satisfy {limit}")


def check_truncation(rank: int | None, energy: float | None) -> None:
    """Raise ValueError if rank and energy are both given, or one is out of range."""
    if rank is not None and energy is not None:
        raise ValueError(
            f"rank={rank} and energy={energy}: give one of the two, set the other to None"
        )
    if rank is not None:
        check_count("rank", rank, least=1)
    if energy is not None:
        check_share("energy", energy, one_allowed=True)


def _check_patterns(field: str, patterns: object) -> tuple[str, ...]:
    """The patterns as a tuple; ValueError names the one that is no regular expression."""
    if isinstance(patterns, str) or not isinstance(patterns, (tuple, list)):
        raise ValueError(
            f"{field}={patterns!r}: needs a tuple of regular expressions, as in ({patterns!r},)"
        )
    for pattern in patterns:
        try:
            re.compile(pattern).search("")
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{field}: {pattern!r} is no regular expression ({error}); correct it"
            ) from error
    return tuple(patterns)


@dataclass(frozen=True, slots=True)
class SoupConfig:
    """When a run is merged with its best previous weights, and how.

    Args:
        merge_every_n_steps: optimizer steps from one merge point to the next; with "ema" a merge
            point only scores the average beside the run's weights (gate "metric").
        start_after_step: no merge point at or before this step.
        stop_after_step: no merge point after this step; None: to the end.
        method: "svd_mean" (weighted mean of truncated deltas), "monosoup" (arXiv 2602.09689, on the
            weighted mean delta), "mean" (plain weighted mean), "ema" (exponential moving average
            of the run's weights, a side soup: training never sees it; rank, energy, weight and
            optimizer_state have no meaning there and are refused).
        rank: singular triplets kept by svd_mean; 64 unless `energy` is given. The other methods
            keep all, and refuse it.
        energy: share of the squared singular values to keep, in (0, 1], instead of a rank; for
            monosoup the R of its variance variant. One of rank and energy.
        weight: share of the partner in the merge, in (0, 1); the run's own weights have 1 - weight.
        feed_back: False: a side soup. Training goes on as if there were no merges, and ends with
            the soup if that scores better than the run itself by two standard errors of the gate's
            batches. True: training goes on from the merged weights; no gate can then tell how it
            would have ended without.
        gate: "metric": a merge is kept only if it scores at least as well as the weights before it.
        gate_batches: evaluation batches that the gate scores.
        metric_for_best: name of the metric that chooses the partner; None is no choice.
        greater_is_better: direction of that metric.
        optimizer_state: "keep": moments stay those of the run; "reset": they start anew after a
            merge.
        include, exclude: regular expressions searched in parameter names; empty include: all.
        seed: of the sketches of the SVD; never touches the global generators.
        ema_decay: share of itself that the average keeps at each update, in (0, 1), once it has
            seen enough: update n keeps min(ema_decay, n / (n + 9)), counted from 0, so that the
            weights it began with are forgotten.
        ema_every_n_steps: optimizer steps from one update of the average to the next.
        ema_place: where each rank's float32 shards of the average live: "device" (where the
            weights are), "host" (memory), "disk" (a mapped file in the soup folder).
        load_at_end: where training sees no merges (feed_back False, ema): when it ends, the live
            weights become the side soup or the average, if the run ends with it, so that saving the
            model saves that. None: True there, and False with feed_back.
        undo: where the weights before a merge wait for the gate's verdict: "disk", or "memory"
            (each rank's own shards, in host memory). While an ema is scored they are always in
            host memory.
    Raises:
        ValueError: any value out of range.
    """

    merge_every_n_steps: int = 1000
    start_after_step: int = 0
    stop_after_step: int | None = None
    method: RunMethod = "svd_mean"
    rank: int | None = None
    energy: float | None = None
    weight: float = 0.5
    feed_back: bool = False
    gate: Gate = "metric"
    gate_batches: int = 8
    metric_for_best: str = "eval_loss"
    greater_is_better: bool = False
    optimizer_state: OptimizerState = "keep"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    seed: int = 0
    ema_decay: float = 0.999
    ema_every_n_steps: int = 1
    ema_place: Place = "device"
    undo: Undo = "disk"
    load_at_end: bool | None = None

    def __post_init__(self) -> None:
        """Check every field; fill in what depends on the method."""
        check_count("merge_every_n_steps", self.merge_every_n_steps, least=1)
        check_count("start_after_step", self.start_after_step, least=0)
        if self.stop_after_step is not None:
            check_count("stop_after_step", self.stop_after_step, least=self.start_after_step + 1)
        check_choice("method", self.method, get_args(RunMethod))
        check_truncation(self.rank, self.energy)
        if self.method == "svd_mean" and self.rank is None and self.energy is None:
            object.__setattr__(self, "rank", DEFAULT_RANK)
        check_share("weight", self.weight, one_allowed=False)
        check_choice("gate", self.gate, get_args(Gate))
        check_count("gate_batches", self.gate_batches, least=1)
        check_choice("optimizer_state", self.optimizer_state, get_args(OptimizerState))
        check_choice("feed_back", self.feed_back, (True, False))
        check_choice("load_at_end", self.load_at_end, (True, False, None))
        check_choice("greater_is_better", self.greater_is_better, (True, False))
        check_share("ema_decay", self.ema_decay, one_allowed=False)
        check_count("ema_every_n_steps", self.ema_every_n_steps, least=1)
        check_choice("ema_place", self.ema_place, get_args(Place))
        check_choice("undo", self.undo, get_args(Undo))
        self._refuse_what_the_method_ignores()
        if self.load_at_end and self.feed_back:
            raise ValueError(
                "load_at_end=True with feed_back=True: the live weights are what the run ends with "
                "already; leave load_at_end out"
            )
        if not isinstance(self.metric_for_best, str) or not self.metric_for_best:
            raise ValueError(
                f"metric_for_best={self.metric_for_best!r}: needs a metric's name, as 'eval_loss'"
            )
        check_count("seed", self.seed, least=0)
        for field in ("include", "exclude"):
            object.__setattr__(self, field, _check_patterns(field, getattr(self, field)))

    def is_merge_point(self, step: int) -> bool:
        """Whether a run merges after optimizer step `step`."""
        if step <= self.start_after_step or step % self.merge_every_n_steps:
            return False
        return self.stop_after_step is None or step <= self.stop_after_step

    @property
    def loads_at_end(self) -> bool:
        """What `load_at_end` says, or is left to mean."""
        return not self.feed_back if self.load_at_end is None else self.load_at_end

    def _refuse_what_the_method_ignores(self) -> None:
        """Raise ValueError for a setting that was chosen and would do nothing."""
        is_ema = self.method == "ema"
        if is_ema and self.feed_back:
            raise ValueError(
                'feed_back=True with method="ema": the average is a side soup that training never '
                'sees; leave feed_back out, or feed back merges with method="mean"'
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _IGNORED[self.method] and value != field.default:
                user = "ema" if field.name in _ONLY_EMA_USES else "svd_mean"
                remedy = "" if is_ema else f', or use method="{user}"'
                raise ValueError(
                    f'{field.name}={value!r} has no meaning with method="{self.method}": leave it '
                    f"out{remedy}"
                )


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """Where the variant that a run ends with is written, and how.

    Args:
        family: folder of the family, created if absent.
        name: of the variant: a folder name and a model id.
        encoding: of its matrices, as in `soupkit export --encoding`: "row" is one bit a weight and
            a scale an output row; "raw" stores them whole; "auto" takes of each matrix the form
            that loses least within budget_bytes, and reads all weights twice for it.
        budget_bytes: of variant.safetensors, with "auto"; None: what "row" would take. Too small a
            budget is known only when the run ends: the variant is then refused, and the least told.
    Raises:
        ValueError: any value out of range.
    """

    family: str | Path
    name: str
    encoding: str = "row"
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.family, (str, Path)) or not str(self.family):
            raise ValueError(f"family={self.family!r}: needs the path of a folder")
        check_variant_name(self.name)
        if self.encoding != AUTO:
            parse_encoding(self.encoding)
        if self.budget_bytes is not None:
            check_count("budget_bytes", self.budget_bytes, least=0, most=MAX_BUDGET)
            if self.encoding != AUTO:
                raise ValueError(
                    f'budget_bytes={self.budget_bytes} goes with encoding="{AUTO}", not with '
                    f"{self.encoding!r}"
                )
