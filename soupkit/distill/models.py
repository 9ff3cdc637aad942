"""Teacher and student: the fine-tune's logits, and the base with a variant's delta to be trained.

Both compute in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from soupkit.bundle import Variant
from soupkit.delta import canonical_name
from soupkit.distill.batches import Batch, check_tokens, collate, num_scored
from soupkit.distill.layers import DeltaEmbedding, DeltaLinear, TrainedDelta
from soupkit.encoding import decode
from soupkit.errors import BundleError
from soupkit.forms import Encoding
from soupkit.quality import Row, open_model
from soupkit_kernels import Delta


def scored_logits(model: nn.Module, batch: Batch, swapped: Mapping[str, Tensor]) -> Tensor:
    """Logits [scored positions, vocabulary] of a batch, some parameters replaced."""
    check_tokens(batch, model)
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask, "use_cache": False}
    logits: Tensor = torch.func.functional_call(model, dict(swapped), kwargs=inputs).logits
    return logits[batch.scored].float()


class Teacher:
    """The fine-tune's logits on some rows: computed once where they fit, else for every batch.

    A vocabulary of 50,000 and 10,000 scored tokens take 2 GB; the model is dropped once they are
    there.
    """

    def __init__(
        self,
        folder: Path,
        rows: Sequence[Row],
        *,
        batch: int,
        max_bytes: int,
        device: torch.device,
    ) -> None:
        """Load the fine-tune, and run it over the rows if max_bytes hold all their logits."""
        self._rows, self._device = rows, device
        self._model: nn.Module | None = open_model(folder, device=device)
        self._cache: list[Tensor] = []
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        if 4 * vocabulary * sum(map(num_scored, rows)) > max_bytes:
            return
        for start in range(0, len(rows), batch):
            some = rows[start : start + batch]
            sizes = [num_scored(row) for row in some]
            self._cache += torch.split(self._run(some).cpu(), sizes)
        self._model = None

    @property
    def is_cached(self) -> bool:
        """Whether all logits are in memory, and the model is not."""
        return self._model is None

    def logits(self, indices: Sequence[int]) -> Tensor:
        """float32 [scored positions, vocabulary] of these rows, one below the other."""
        if self._model is None:
            return torch.cat([self._cache[index] for index in indices]).to(self._device)
        return self._run([self._rows[index] for index in indices])

    @torch.no_grad()
    def _run(self, rows: Sequence[Row]) -> Tensor:
        assert self._model is not None
        return scored_logits(self._model, collate(rows).to(self._device), {})


class Student:
    """The base with a variant in it, whose scales, and norms if asked for, are trained.

    Attributes: trained: by parameter name.
    """

    def __init__(
        self,
        base: Path,
        variant: Variant,
        *,
        norm_units: Mapping[str, float],
        device: torch.device,
    ) -> None:
        """Load both.

        Args:
            norm_units: of the raw vectors to train, the size of a step of 1; the rest are fixed.
        Raises:
            BundleError: the variant has a parameter that the model lacks, or resized its
                vocabulary.
        """
        self.trained: dict[str, TrainedDelta] = {}
        self._norms: dict[str, _TrainedVector] = {}
        self._model = open_model(base, device=device)
        self._device = device
        places = {
            canonical_name(name): name
            for name, _ in self._model.named_parameters(remove_duplicate=False)
        }
        self._untie(
            [
                places.get(entry.name, entry.name)
                for entry in variant.manifest.tensors
                if entry.kind != "tied"
            ]
        )
        for entry in variant.manifest.tensors:
            if entry.kind not in ("delta", "raw"):
                continue
            weight = self._parameter(places.get(entry.name, entry.name), entry.shape)
            if entry.kind == "delta":
                encoding = Encoding.parse(entry.encoding or "")
                self._add_delta(entry.name, weight, variant.delta(entry.name), encoding)
                continue
            start = variant.raw(entry.name)
            if entry.name in norm_units:
                place = places.get(entry.name, entry.name)
                vector = _TrainedVector(place, start.to(device), norm_units[entry.name])
                self._norms[entry.name] = vector
            weight.data.copy_(start)

    def parameters(self) -> list[nn.Parameter]:
        """All that is trained, always in the same order."""
        steps = [
            step
            for one in self.trained.values()
            for step in (one.row_step, one.column_step)
            if step is not None
        ]
        return [*steps, *(norm.step for norm in self._norms.values())]

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """float32 [scored positions, vocabulary], differentiable by `parameters()`."""
        swapped = {norm.place: norm.value().float() for norm in self._norms.values()}
        return scored_logits(self._model, collate(rows).to(self._device), swapped)

    def deltas(self) -> dict[str, Delta]:
        """The deltas with their scales as they are now."""
        return {name: one.delta() for name, one in self.trained.items()}

    def raw(self) -> dict[str, Tensor]:
        """The trained vectors as they are now, in the dtype they are stored in."""
        return {name: norm.value().detach().cpu() for name, norm in self._norms.items()}

    def put(self, deltas: Mapping[str, Delta]) -> None:
        """Start over from these scales, as if the variant had them."""
        for name, delta in deltas.items():
            old = self.trained[name]
            assert delta.scale is not None
            old.start.copy_(delta.scale)
            if old.column_start is not None and delta.column_scale is not None:
                old.column_start.copy_(delta.column_scale)

    def _untie(self, places: Sequence[str]) -> None:
        """Give each of these parameters a copy of its own where the base ties two of them."""
        known = dict(self._model.named_parameters(remove_duplicate=False))
        taken: set[int] = set()
        for place in places:
            if id(known.get(place)) in taken:
                parent, _, name = place.rpartition(".")
                copy = nn.Parameter(known[place].detach().clone(), requires_grad=False)
                self._model.get_submodule(parent).register_parameter(name, copy)
            elif place in known:
                taken.add(id(known[place]))

    def _parameter(self, place: str, shape: tuple[int, ...]) -> nn.Parameter:
        try:
            weight: nn.Parameter = self._model.get_parameter(place)
        except AttributeError:
            raise BundleError(
                f"the model has no parameter {place!r} that the variant has"
            ) from None
        if tuple(weight.shape) != shape:
            raise BundleError(
                f"{place!r} has shape {shape}, the base {tuple(weight.shape)}: a variant with "
                "another vocabulary cannot be distilled"
            )
        return weight

    def _add_delta(self, name: str, weight: nn.Parameter, delta: Delta, encoding: Encoding) -> None:
        """Put the fixed part of a delta into the weight and swap the modules that apply it."""
        users = list(_users(self._model, weight))
        is_plain = bool(users) and all(type(one) in (nn.Linear, nn.Embedding) for *_, one in users)
        if not delta.planes or not is_plain:
            weight.data += decode(delta).to(weight.device).reshape(weight.shape)
            return
        if delta.up is not None:
            low = Delta(delta.out_features, delta.in_features, up=delta.up, down=delta.down)
            weight.data += decode(low).to(weight.device)
        trained = TrainedDelta(delta, encoding.scale, is_sparse=encoding.is_sparse)
        self.trained[name] = trained.to(weight.device)
        for parent, child, module in users:
            swapped: nn.Module = (
                DeltaLinear(module, trained)
                if isinstance(module, nn.Linear)
                else DeltaEmbedding(module, trained)  # type: ignore[arg-type]
            )
            setattr(parent, child, swapped)


class _TrainedVector:
    """start + unit step, rounded to the stored dtype; the gradient goes through the rounding."""

    def __init__(self, place: str, start: Tensor, unit: float) -> None:
        self.place, self._start, self._unit = place, start, unit
        self.step = nn.Parameter(torch.zeros_like(start, dtype=torch.float32))

    def value(self) -> Tensor:
        return (self._start.float() + self._unit * self.step).to(self._start.dtype)


def _users(model: nn.Module, weight: nn.Parameter) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name in it, module) of every module that holds this weight as a parameter."""
    for parent in list(model.modules()):
        for child, module in list(parent.named_children()):
            if any(held is weight for held in module.parameters(recurse=False)):
                yield parent, child, module
