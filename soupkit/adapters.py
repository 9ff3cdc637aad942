"""A delta as a PEFT LoRA adapter folder: adapter_config.json and adapter_model.safetensors.

    W_ft - W_base ~ B A,   A [r, in], B [out, r],   lora_alpha = r, so that PEFT's scaling is 1

Only weights of linear layers travel; norms, biases, embeddings, convolutions and experts that
changed are named in the report. A delta of rank at most r is reproduced exactly; of a variant that
stores nothing but factors, they are the adapter's. Format: PEFT 0.21 (PEFT itself is only the
test's oracle).
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soupkit.adapter_config import CONFIG_NAME, WEIGHTS_NAME, plain_config
from soupkit.checkpoint import Checkpoint
from soupkit.config import DEFAULT_RANK, check_count
from soupkit.delta import TensorSource, is_embedding, layout, subtract
from soupkit.encoding import decode
from soupkit.errors import CheckpointError
from soupkit.export import Progress
from soupkit.family import open_base, open_family
from soupkit.files import atomic_folder, atomic_write_json
from soupkit.lora import Factors, factor
from soupkit.manifest import TensorEntry
from soupkit.numeric import squared_norm
from soupkit.pairs import naming_the_culprit, pair_names
from soupkit.restore import check_covers, open_intact
from soupkit.shards import SpooledFile
from soupkit_kernels import Delta

# Relative energy below which a float32 factorisation is as good as the delta itself.
EXACT_ENERGY = 1e-10

# transformers' Conv1D keeps [in, out]: PEFT calls that fan_in_fan_out.
_TRANSPOSED_TYPES = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc|q_attn)\.weight$")


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What an adapter keeps of a fine-tune.

    Attributes:
        path: the adapter folder. ranks: by module. lost: ||delta - B A||^2 / ||delta||^2 by module.
        lost_energy: the same over all modules together. left_out: changed parameters that an
            adapter cannot hold, with their share of the whole delta's energy in left_out_energy.
    """

    path: Path
    ranks: dict[str, int]
    lost: dict[str, float]
    lost_energy: float
    left_out: tuple[str, ...]
    left_out_energy: float

    @property
    def is_exact(self) -> bool:
        """Whether base + adapter is the fine-tune, but for float32 rounding."""
        return not self.left_out and self.lost_energy <= EXACT_ENERGY


def export_adapter(
    base: Checkpoint,
    finetuned: TensorSource,
    *,
    out: str | Path,
    rank: int | None = None,
    progress: Progress | None = None,
) -> AdapterReport:
    """Write the difference between a fine-tune and its base as a PEFT adapter to the new folder
    `out`.

    Args:
        rank: largest rank of a module; None: 64, or as much as it takes to be exact up to 256.
        progress: called after each tensor with its name, entries done, entries in all.

    Raises:
        CheckpointError: the models do not fit, or no linear layer changed. MergeError: a weight is
            NaN.
        FileExistsError, OSError: `out` has content, or the disk refused. Nothing stands at `out`
            then.
    """
    pairs = pair_names(base, finetuned)
    done, total = 0, sum(math.prod(finetuned.shape(ours)) for ours, _ in pairs)
    with _building(Path(out), base, rank) as builder:
        for ours, theirs in pairs:
            with naming_the_culprit(ours, base, finetuned):
                builder.add(ours, finetuned.tensor(ours), base.tensor(theirs))
            done += math.prod(finetuned.shape(ours))
            if progress:
                progress(ours, done, total)
        return builder.finish(Path(out))


def export_variant_adapter(
    family: str | Path,
    name: str,
    *,
    out: str | Path,
    base: str | Path | None = None,
    rank: int | None = None,
    progress: Progress | None = None,
) -> AdapterReport:
    """Write a variant of a family as a PEFT adapter to the new folder `out`.

    Args:
        base: folder or hub id of the base; None: where the family says it is.
        rank: largest rank of a module; None: of a delta that is stored as factors alone theirs,
            which loses nothing, otherwise as in export_adapter.
        progress: called after each tensor with its name, entries done, entries in all.

    Raises:
        BundleError: no such variant, damaged, or another base. Else as export_adapter.
    """
    found = open_family(family)
    variant = open_intact(found, name)
    checkpoint = open_base(found, base)
    check_covers(variant, checkpoint)
    entries = [entry for entry in variant.manifest.tensors if entry.kind in ("delta", "raw")]
    done, total = 0, sum(math.prod(entry.shape) for entry in entries)
    with _building(Path(out), checkpoint, rank) as builder:
        for entry in entries:
            if entry.kind == "raw":
                builder.add(entry.name, variant.raw(entry.name), checkpoint.tensor(entry.name))
            else:
                builder.add_encoded(entry, variant.delta(entry.name))
            done += math.prod(entry.shape)
            if progress:
                progress(entry.name, done, total)
        return builder.finish(Path(out))


@contextmanager
def _building(out: Path, base: Checkpoint, rank: int | None) -> Iterator["_Builder"]:
    """A builder in a folder that becomes `out` when the block ends well."""
    if rank is not None:
        check_count("rank", rank, least=1)
    with atomic_folder(out) as folder:
        builder = _Builder(folder, base, rank)
        try:
            yield builder
        finally:
            builder.close()


class _Builder:
    """Collects the factors of one module after the other."""

    def __init__(self, folder: Path, base: Checkpoint, rank: int | None) -> None:
        self._folder = folder
        self._base = base
        self._rank = rank
        self._file = SpooledFile(folder / WEIGHTS_NAME)
        self._ranks: dict[str, int] = {}
        self._lost: dict[str, float] = {}
        self._left_out: list[str] = []
        self._energy = {"module": 0.0, "lost": 0.0, "left_out": 0.0}

    def add(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        """Factor one parameter, or note that it cannot travel."""
        if ours.shape != theirs.shape or not ours.is_floating_point():
            self._left_out += [name] if not torch.equal(ours, theirs) else []
            return
        self._add_delta(name, subtract(ours, theirs, name=name))

    def add_encoded(self, entry: TensorEntry, encoded: Delta) -> None:
        """The same for a delta as a variant stores it."""
        known: Factors | None = None
        if encoded.up is not None and encoded.down is not None and not encoded.planes:
            known = Factors(a=encoded.down.float(), b=encoded.up.float())
        self._add_delta(entry.name, decode(encoded).reshape(entry.shape), known)

    def _add_delta(self, name: str, delta: Tensor, known: Factors | None = None) -> None:
        energy = squared_norm(delta)
        if energy == 0.0:
            return
        if not self._is_linear(name, tuple(delta.shape)):
            self._left_out.append(name)
            self._energy["left_out"] += energy
            return
        is_transposed = self._is_transposed(name)
        if known is not None and (self._rank is None or known.rank <= self._rank):
            factors, lost = known, 0.0
            if is_transposed:
                factors = Factors(a=known.b.T.contiguous(), b=known.a.T.contiguous())
        else:
            factors, lost = self._factor(delta.T if is_transposed else delta)
        module = name.removesuffix(".weight")
        self._file.add(f"base_model.model.{module}.lora_A.weight", factors.a)
        self._file.add(f"base_model.model.{module}.lora_B.weight", factors.b)
        self._ranks[module], self._lost[module] = factors.rank, lost
        self._energy["module"] += energy
        self._energy["lost"] += lost * energy

    def _is_linear(self, name: str, shape: tuple[int, ...]) -> bool:
        if layout(name, shape) != "matrix" or not name.endswith(".weight"):
            return False
        return not is_embedding(name) and name not in self._base.tied.values()

    def _is_transposed(self, name: str) -> bool:
        is_type = self._base.config.get("model_type") in _TRANSPOSED_TYPES
        return is_type and _TRANSPOSED.search(name) is not None

    def _factor(self, delta: Tensor) -> tuple[Factors, float]:
        """Factors of at most the rank asked for; trailing zeros cut off."""
        limit = min(delta.shape)
        tried = [self._rank] if self._rank else [DEFAULT_RANK, 2 * DEFAULT_RANK, 4 * DEFAULT_RANK]
        first: tuple[Factors, float] | None = None
        for rank in dict.fromkeys(min(rank, limit) for rank in tried):
            found = factor(delta, rank=rank)
            first = first or found
            if found[1] <= EXACT_ENERGY:
                return _trim(found[0]), found[1]
        assert first is not None
        return first

    def finish(self, out: Path) -> AdapterReport:
        """Write the adapter's two files."""
        if not self._ranks:
            left = ", ".join(self._left_out[:3]) or "nothing"
            raise CheckpointError(
                f"no linear layer changed ({left} did): a LoRA adapter would be empty"
            )
        self._file.finish(metadata={"format": "pt"})
        atomic_write_json(self._folder / CONFIG_NAME, self._config())
        energy = self._energy
        return AdapterReport(
            path=out,
            ranks=self._ranks,
            lost=self._lost,
            lost_energy=energy["lost"] / energy["module"],
            left_out=tuple(self._left_out),
            left_out_energy=energy["left_out"] / (energy["left_out"] + energy["module"]),
        )

    def _config(self) -> dict[str, Any]:
        is_transposed = any(self._is_transposed(f"{module}.weight") for module in self._ranks)
        return plain_config(
            base=self._base.source,
            revision=self._base.revision,
            ranks=self._ranks,
            carried={"task_type": "CAUSAL_LM", "fan_in_fan_out": is_transposed},
        )

    def close(self) -> None:
        """Drop what is unfinished."""
        self._file.close()


def _trim(factors: Factors) -> Factors:
    """Without the trailing pairs that hold only float32 rounding; at least one pair stays."""
    sizes = factors.b.norm(dim=0) * factors.a.norm(dim=1)
    limit = torch.finfo(torch.float32).eps * float(sizes.max())
    rank = max(1, int((sizes > limit * max(factors.a.shape[1], factors.b.shape[0])).sum()))
    return Factors(a=factors.a[:rank].contiguous(), b=factors.b[:, :rank].contiguous())
