"""A variant on disk, read: variant.safetensors and its manifest.json, both checked as hostile
input.

    W_eff = W_base + sum_p diag(scale_p) sign_p diag(column_p) + up down    for "delta"
    W_eff = raw                                                             for "raw"

Opening is cheap: the manifest against its schema and checksum, and the file's header against the
manifest. Loading reads the whole file into memory of its own, in parallel, and checks the content
digest and that every number is finite, in one pass. Any fault is a BundleError.
soupkit.export writes variants; soupkit.family keeps several.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soupkit.errors import BundleError
from soupkit.family import BaseRef, Family, VariantRef, open_family
from soupkit.family_write import add_variant, create_or_open_family
from soupkit.files import fault_text, open_regular, read_json
from soupkit.fingerprint import Entry, digest_of, num_threads
from soupkit.manifest import MANIFEST_NAME, WEIGHTS_NAME, Manifest, TensorEntry, matrix_shape
from soupkit.numeric import is_finite
from soupkit.streaming import host_buffer, read_checked
from soupkit.tensorfile import (
    Slot,
    TensorSpec,
    dtype_name,
    read_header,
    read_into,
    typed,
)
from soupkit_kernels import Delta

__all__ = [
    "BaseRef",
    "Family",
    "LoadedVariant",
    "Manifest",
    "TensorEntry",
    "Variant",
    "VariantRef",
    "add_variant",
    "create_or_open_family",
    "open_family",
    "open_variant",
]

# The axis of a stored part that is the matrix's rows; column scales and `down` have none.
_ROW_AXES = {"sign": 1, "scale": 1, "up": 0, "raw": 0}


@dataclass(frozen=True, slots=True)
class LoadedVariant:
    """All tensors of a variant in host memory.

    Attributes:
        deltas: packed deltas by parameter name. raw: whole tensors by parameter name, in the
            fine-tune's dtype. digest: content digest. nbytes: of all tensors together. manifest:
            what was read.
    """

    deltas: dict[str, Delta]
    raw: dict[str, Tensor]
    digest: str
    nbytes: int
    manifest: Manifest


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn what reading a hostile file can raise into BundleError that names the file."""
    try:
        yield
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from None
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        raise BundleError(fault_text(error, path)) from error


class Variant:
    """A variant folder that was opened and checked; its tensors are read when asked for.

    Attributes: path: the folder. manifest: what it holds.
    """

    def __init__(self, path: Path, manifest: Manifest, slots: dict[str, Slot]) -> None:
        """For open_variant only."""
        self.path = path
        self.manifest = manifest
        self._slots = slots
        self._entries = manifest.entries()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(slot.spec.nbytes for slot in self._slots.values())

    def entry(self, param: str) -> TensorEntry:
        """How a parameter is stored. Raises BundleError for a parameter that the variant does not
        know.
        """
        if param not in self._entries:
            raise BundleError(f"{self.path}: the variant has no parameter {param!r}")
        return self._entries[param]

    def delta(self, param: str, rows: slice | None = None) -> Delta:
        """The packed delta of one parameter, read now; scales and factors are checked to be finite.

        Args:
            rows: start and stop of those wanted of the matrix; None: all.
        Raises:
            BundleError: it is not stored as a delta, or the file is damaged.
        """
        self._need_kind(param, "delta")
        return self._delta(param, lambda name: self._finite(name, self._read(name, rows)), rows)

    def raw(self, param: str, rows: slice | None = None) -> Tensor:
        """One parameter that is stored whole, read now, checked to be finite.

        Args:
            rows: start and stop of those wanted of the first axis; None: the whole tensor.
        Raises:
            BundleError: it is not stored whole, or the file is damaged.
        """
        self._need_kind(param, "raw")
        return self._finite(f"{param}.raw", self._read(f"{param}.raw", rows))

    def load(
        self, *, check: bool = True, threads: int | None = None, pin_memory: bool = False
    ) -> LoadedVariant:
        """Read everything, in parallel threads, into one buffer that the tensors are views of.

        Args:
            check: compare the content digest with the manifest's; costs a sha256 of every byte.
            threads: that read, hash and check; None: as many as are of use on this machine.
            pin_memory: read into page-locked memory, from where a GPU takes copies by itself.
        Raises:
            BundleError: truncated, damaged, not finite.
        """
        path = self.path / WEIGHTS_NAME
        with _faults_of(path):
            tensors, hashes, infinite = self._read_all(
                check=check, threads=threads or num_threads(), pin_memory=pin_memory
            )
        digest = self._checked(digest_of(hashes)) if check else self.manifest.digest
        for name in sorted(infinite):
            raise BundleError(self._not_finite(name))
        return self._loaded(tensors, digest)

    def mapped(self) -> LoadedVariant:
        """All tensors as private views of the mapped file: nothing is read now or checked, and all
        stays readable when the file is removed, but not when it is cut: for a copy that was
        checked and that nobody else writes.

        Raises:
            BundleError: the file cannot be mapped.
        """
        path = self.path / WEIGHTS_NAME
        start = min((slot.start for slot in self._slots.values()), default=0)
        tensors: dict[str, Tensor] = {}
        with _faults_of(path), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[start:]
            for name, slot in self._slots.items():
                tensors[name] = typed(whole[slot.start - start : slot.stop - start], slot.spec)
        return self._loaded(tensors, self.manifest.digest)

    def check_digest(self) -> None:
        """Compare the content digest with the manifest's, holding a piece a thread at most.

        Raises:
            BundleError: truncated or damaged.
        """
        with ThreadPoolExecutor(num_threads()) as pool:
            self._checked(digest_of(entry for entry, _ in pool.map(self._look_at, self._slots)))

    def content_faults(self, told: Callable[[int], None] | None = None) -> list[str]:
        """What is wrong with the weights: damage, and each tensor that is not finite though the
        digest fits; every byte is read once, by threads that hold a piece each.

        Args:
            told: called with the bytes of each tensor that was looked at.
        """
        faults: list[str] = []
        entries: list[Entry] = []
        # Largest first, so that no thread is left alone with the embedding at the end.
        order = sorted(self._slots, key=lambda name: -self._slots[name].spec.nbytes)
        odd: set[str] = set()
        try:
            with ThreadPoolExecutor(num_threads()) as pool:
                for name, (entry, all_finite) in zip(
                    order, pool.map(self._look_at, order), strict=True
                ):
                    entries.append(entry)
                    odd |= set() if all_finite else {name}
                    if told:
                        told(self._slots[name].spec.nbytes)
            self._checked(digest_of(entries))
        except BundleError as error:
            faults.append(str(error))
        return faults + [self._not_finite(name) for name in self._slots if name in odd]

    def _look_at(self, name: str) -> tuple[Entry, bool]:
        """The hash of a stored tensor, and whether all its numbers are finite."""
        slot, path = self._slots[name], self.path / WEIGHTS_NAME
        with _faults_of(path), open_regular(path) as file:
            sha, all_finite = read_checked(file.fileno(), slot)
        return (name, dtype_name(slot.spec.dtype), slot.spec.shape, sha), all_finite

    def _loaded(self, tensors: Mapping[str, Tensor], digest: str) -> LoadedVariant:
        deltas: dict[str, Delta] = {}
        raw: dict[str, Tensor] = {}
        for entry in self.manifest.tensors:
            name = entry.name
            if entry.kind == "delta":
                deltas[name] = self._delta(name, tensors.__getitem__)
            elif entry.kind == "raw":
                raw[name] = tensors[f"{name}.raw"]
        return LoadedVariant(deltas, raw, digest, self.nbytes, self.manifest)

    def _checked(self, digest: str) -> str:
        """`digest` if it is the manifest's; BundleError otherwise."""
        if digest != self.manifest.digest:
            raise BundleError(
                f"{self.path / WEIGHTS_NAME}: its content has digest {digest}, its manifest says "
                f"{self.manifest.digest}: it was damaged or replaced; export the variant again"
            )
        return digest

    def _need_kind(self, param: str, kind: str) -> None:
        entry = self.entry(param)
        if entry.kind != kind:
            raise BundleError(f"{self.path}: {param!r} is stored as {entry.kind!r}, not {kind!r}")

    def _read(self, name: str, rows: slice | None = None) -> Tensor:
        """A stored tensor; of one that has an entry or more for each row, those of some rows."""
        slot, part = self._slots[name], name.rpartition(".")[2]
        shape, axis = slot.spec.shape, _ROW_AXES.get(part)
        if rows is None or axis is None or (part == "scale" and shape[1] == 1):
            rows, axis, shape = slice(0, 1), 0, (1, *shape)
        width = math.prod(shape[axis + 1 :]) * slot.spec.dtype.itemsize
        size = (rows.stop - rows.start) * width
        count = math.prod(shape[:axis])
        buffer = torch.empty(count * size, dtype=torch.uint8)
        path = self.path / WEIGHTS_NAME
        with _faults_of(path), open_regular(path) as file:
            for index in range(count):
                start = slot.start + (index * shape[axis] + rows.start) * width
                read_into(file.fileno(), buffer[index * size : (index + 1) * size], start)
        cut = (*shape[:axis], rows.stop - rows.start, *shape[axis + 1 :])
        whole = cut if shape == slot.spec.shape else slot.spec.shape
        return typed(buffer, TensorSpec(slot.spec.dtype, whole))

    def _read_all(
        self, *, check: bool, threads: int, pin_memory: bool
    ) -> tuple[dict[str, Tensor], list[Entry], list[str]]:
        """Every tensor, a view of one buffer in the file's order, the hashes if asked for, and the
        names of those that are not finite.
        """
        start = min((slot.start for slot in self._slots.values()), default=0)
        whole = host_buffer(self.nbytes, pin_memory=pin_memory)
        tensors: dict[str, Tensor] = {}
        infinite: list[str] = []

        with open_regular(self.path / WEIGHTS_NAME) as file:

            def read(item: tuple[str, Slot]) -> Entry:
                name, slot = item
                part = whole[slot.start - start : slot.stop - start]
                sha, finite = read_checked(file.fileno(), slot, part, check=check)
                tensors[name] = typed(part, slot.spec)
                if not finite:
                    infinite.append(name)
                return name, dtype_name(slot.spec.dtype), slot.spec.shape, sha

            with ThreadPoolExecutor(threads) as pool:
                # Largest first, so that no thread is left alone with the embedding at the end.
                order = sorted(self._slots.items(), key=lambda item: -item[1].spec.nbytes)
                hashes = list(pool.map(read, order))
        return tensors, hashes, infinite

    def _delta(self, param: str, read: Callable[[str], Tensor], some: slice | None = None) -> Delta:
        """The delta, or some rows of it, of the parts that its entry lists; `read` gives a tensor
        of the file, checked to be finite.
        """
        entry = self.entry(param)
        parts = {name.rpartition(".")[2]: read(name) for name in entry.stored_specs()}
        rows, columns = matrix_shape(param, entry.shape)
        return Delta(
            rows if some is None else some.stop - some.start,
            columns,
            packed=parts.get("sign"),
            scale=parts.get("scale"),
            column_scale=parts.get("column"),
            up=parts.get("up"),
            down=parts.get("down"),
        )

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        if not is_finite(tensor):
            raise BundleError(self._not_finite(name))
        return tensor

    def _not_finite(self, name: str) -> str:
        return f"{self.path / WEIGHTS_NAME}: {name!r} holds NaN or infinity; export it again"


def open_variant(folder: str | Path) -> Variant:
    """Open a variant folder: its manifest and the header of its weights are read and compared.

    Raises:
        BundleError: missing, truncated, hostile, or the two do not fit.
    """
    folder = Path(folder)
    for name in (MANIFEST_NAME, WEIGHTS_NAME):
        if (folder / name).is_symlink():
            raise BundleError(f"{folder / name} is a link, which may lead anywhere: copy the file")
    with _faults_of(folder / MANIFEST_NAME):
        document = read_json(folder / MANIFEST_NAME)
    with _faults_of(folder):
        manifest = Manifest.from_json(document)
    path = folder / WEIGHTS_NAME
    with _faults_of(path):
        slots = read_header(path)
        _compare(manifest, slots)
    return Variant(folder, manifest, slots)


def _compare(manifest: Manifest, slots: dict[str, Slot]) -> None:
    """Raise BundleError unless the file holds exactly what the manifest lists."""
    wanted = manifest.stored_specs()
    for name, spec in wanted.items():
        if name not in slots:
            raise BundleError(f"the tensor {name!r} that the manifest lists is missing")
        if slots[name].spec != spec:
            raise BundleError(f"{name!r} is {slots[name].spec}, the manifest says {spec}")
    extra = sorted(set(slots) - set(wanted))
    if extra:
        raise BundleError(f"the tensor {extra[0]!r} is not in the manifest")
