"""The data-light mode: every linear's scales by least squares on its inputs (soupkit.gram).

The inputs are the fine-tune's on the training rows. Models are streamed a layer at a time, and the
Grams of as many linears as `gram_bytes` hold are summed in one pass over the rows, so that memory
is bounded whatever the model's size. Embeddings, tied to the head or not, keep their scales.
Held-out KL decides in the end, as for training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from soupkit.bundle import Variant
from soupkit.checkpoint import Checkpoint
from soupkit.delta import subtract
from soupkit.distill.batches import Batch, collate
from soupkit.distill.streamed import StreamedModel, variant_weights
from soupkit.forms import Encoding
from soupkit.gram import fit_scales
from soupkit.manifest import TensorEntry
from soupkit.quality import Row
from soupkit_kernels import Delta

Progress = Callable[[str, int, int], None]


class GramFit:
    """Fits and scores a variant of `base` against `finetuned` on some rows."""

    def __init__(
        self,
        base: Checkpoint,
        finetuned: Checkpoint,
        variant: Variant,
        rows: Sequence[Row],
        *,
        batch: int,
    ) -> None:
        """Args: batch: rows that run together."""
        self._base, self._finetuned, self._variant = base, finetuned, variant
        self._rows, self._size = rows, batch
        self._teacher = StreamedModel(finetuned.path, finetuned.tensor)

    def fit(
        self, indices: Sequence[int], *, gram_bytes: int, progress: Progress | None = None
    ) -> dict[str, Delta]:
        """New deltas of all linears that have signs.

        Args:
            indices: of the rows whose inputs count.
            progress: called with a linear's name, linears done, linears in all.
        Raises:
            MergeError: a delta is not finite. CheckpointError: the model cannot be streamed.
        """
        entries = self._variant.manifest.entries()
        linears = {
            name: module
            for name, module in self._teacher.linears().items()
            if name in entries and entries[name].planes
        }
        found: dict[str, Delta] = {}
        for group in _groups({name: entries[name] for name in linears}, gram_bytes):
            modules = {name: linears[name] for name in group}
            for name, gram in self._grams(modules, indices).items():
                found[name] = self._fitted(entries[name], gram)
                if progress:
                    progress(name, len(found), len(linears))
        return found

    def held_out_kl(self, indices: Sequence[int], deltas: dict[str, Delta]) -> float:
        """Mean KL(fine-tune || variant) of the answer tokens of some rows, with these deltas."""
        student = StreamedModel(self._base.path, variant_weights(self._base, self._variant, deltas))
        total, count = 0.0, 0
        for batch in self._batches(indices):
            theirs = self._teacher.logits(batch).log_softmax(-1)
            ours = student.logits(batch).log_softmax(-1)
            total += float((theirs.exp() * (theirs - ours)).sum(-1).double().sum())
            count += len(theirs)
        return total / count

    def _batches(self, indices: Sequence[int]) -> Iterator[Batch]:
        for start in range(0, len(indices), self._size):
            yield collate([self._rows[index] for index in indices[start : start + self._size]])

    def _grams(self, modules: dict[str, nn.Module], indices: Sequence[int]) -> dict[str, Tensor]:
        grams: dict[str, Tensor] = {}
        for batch in self._batches(indices):
            with _summing(modules, grams, batch.mask.bool()):
                self._teacher.logits(batch)
        return grams

    def _fitted(self, entry: TensorEntry, gram: Tensor) -> Delta:
        name = entry.name
        ours, theirs = self._finetuned.tensor(name), self._base.tensor(name)

        def read(rows: slice) -> Tensor:
            return subtract(ours[rows], theirs[rows], name=name)

        encoding = Encoding.parse(entry.encoding or "")
        return fit_scales(read, self._variant.delta(name), encoding, gram)


def _groups(entries: dict[str, TensorEntry], gram_bytes: int) -> Iterator[list[str]]:
    """Names in order, as many together as have their Grams in `gram_bytes`; at least one."""
    group: list[str] = []
    held = 0
    for name, entry in entries.items():
        size = 8 * entry.shape[1] ** 2
        if group and held + size > gram_bytes:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


@contextmanager
def _summing(
    modules: dict[str, nn.Module], grams: dict[str, Tensor], is_token: Tensor
) -> Iterator[None]:
    """Add X^T X of what each module is given meanwhile to `grams`, padding left out."""

    def watch(name: str) -> Callable[..., None]:
        def add(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            x = x[is_token] if x.shape[:-1] == is_token.shape else x.flatten(0, -2)
            # A float32 product is not positive semidefinite where tokens are few.
            x = x.double()
            gram = x.T @ x
            grams[name] = grams[name].add_(gram) if name in grams else gram

        return add

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
