"""What one merge did, per matrix and in sum; its line for the terminal, its history entry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from soupkit.merge import MatrixReport

# Properties of a report that sum up its matrices.
_SUMS = ("kept_energy", "delta_norm_before", "delta_norm_after", "cosine")


def finite_or_none(value: float | None) -> float | None:
    """`value`, or None where it is NaN or infinite: JSON has no word for those."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class MergeReport:
    """One merge of the run's weights with a partner.

    Args:
        step: optimizer step at which it happened.
        partner_step: step at which the partner's weights were captured.
        accepted: whether the merged weights were kept (in the run, or as the side soup).
        method, weight: the rule, and the partner's share in it.
        metric_current, metric_merged: score before and after on the same batches; None without a
            gate.
        reason: why it was refused, if it was.
        seconds: wall time of the whole merge point, the scoring included; score_seconds: of the
            scoring alone.
        matrices: one report a parameter, sorted by name; the first of `delta_norms` is the run's,
            the second the partner's.
    """

    step: int
    partner_step: int
    accepted: bool
    method: str
    weight: float
    metric_current: float | None
    metric_merged: float | None
    reason: str
    seconds: float
    score_seconds: float
    matrices: tuple[MatrixReport, ...]

    @property
    def kept_energy(self) -> float:
        """Share of the squared norm that truncation kept, 0..1; 1 where all deltas are 0."""
        weights = [sum(norm**2 for norm in matrix.delta_norms) for matrix in self.matrices]
        total = math.fsum(weights)
        kept = math.fsum(w * m.kept_energy for w, m in zip(weights, self.matrices, strict=True))
        return kept / total if total > 0 else 1.0

    @property
    def delta_norm_before(self) -> float:
        """Frobenius norm of the run's whole delta before the merge."""
        return math.sqrt(math.fsum(matrix.delta_norms[0] ** 2 for matrix in self.matrices))

    @property
    def delta_norm_after(self) -> float:
        """Frobenius norm of the merged delta."""
        return math.sqrt(math.fsum(matrix.merged_norm**2 for matrix in self.matrices))

    @property
    def cosine(self) -> float:
        """Cosine between the run's whole delta and the partner's; 0 where one of them is 0."""
        pairs = [(m.delta_norms[0], m.delta_norms[1], m.cosine) for m in self.matrices]
        inner = math.fsum(first * second * cosine for first, second, cosine in pairs)
        scale = math.sqrt(
            math.fsum(a * a for a, _, _ in pairs) * math.fsum(b * b for _, b, _ in pairs)
        )
        return inner / scale if scale > 0 else 0.0

    def to_json(self, *, matrices: bool = True) -> dict[str, Any]:
        """As JSON values; without `matrices` only the sums, as in a bundle's history."""
        entry: dict[str, Any] = {
            "step": self.step,
            "partner_step": self.partner_step,
            "accepted": self.accepted,
            "method": self.method,
            "weight": self.weight,
            "metric_current": finite_or_none(self.metric_current),
            "metric_merged": finite_or_none(self.metric_merged),
            "reason": self.reason,
            "seconds": self.seconds,
            "score_seconds": self.score_seconds,
            **{name: self._sums().get(name) for name in _SUMS},
        }
        if matrices:
            entry["matrices"] = [matrix.to_json() for matrix in self.matrices]
        return entry

    def scalars(self) -> dict[str, float]:
        """What TensorBoard shows of it, by the names of soupkit.tracking."""
        # A moving average is compared, not merged: it has no partner and no deltas.
        partner = None if self.method == "ema" else float(self.partner_step)
        values = {
            **{f"soup/{name}": value for name, value in self._sums().items()},
            "soup/partner_step": partner,
            "soup/seconds": self.seconds,
            "soup/accepted": float(self.accepted),
            "soup/metric_current": finite_or_none(self.metric_current),
            "soup/metric_merged": finite_or_none(self.metric_merged),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _sums(self) -> dict[str, float]:
        """The sums by name; none where no matrix was merged (an ema, a merge that failed)."""
        return {name: getattr(self, name) for name in _SUMS} if self.matrices else {}

    def line(self, metric_name: str) -> str:
        """One line for the terminal."""
        with_whom = f"with step {self.partner_step}"
        verdict = f"merged {with_whom}"
        if not self.accepted:
            verdict = f"merge {with_whom} refused, weights restored"
        if self.method == "ema":
            verdict = f"moving average {'better' if self.accepted else 'worse'} than the weights"
        parts = [f"step {self.step}: {verdict}"]
        if self.metric_current is not None:
            after = "-" if self.metric_merged is None else f"{self.metric_merged:.6g}"
            parts.append(f"{metric_name} {self.metric_current:.6g} -> {after}")
        if self.matrices:
            parts.append(f"energy kept {self.kept_energy:.1%}, cosine {self.cosine:.3f}")
        if self.reason:
            parts.append(self.reason)
        return "; ".join([*parts, f"{self.seconds:.2f} s"])
