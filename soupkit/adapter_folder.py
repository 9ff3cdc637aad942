"""PEFT LoRA adapter folders: adapter_config.json and adapter_model.safetensors, read lazily.

Names of modules are the base model's, without "base_model.model.", an adapter's name and wrapper
parts. PEFT numbers the bare parameters of one module by ".base_layer" instead of naming them, and
so do the names here: adapters mean the same by them only if `carried["target_parameters"]` is the
same. What is more than plain LoRA is refused by name. Format: PEFT 0.21 (PEFT itself is only the
tests' oracle). Not here: merges, and whether a base has the modules.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from soupkit.adapter_config import CONFIG_NAME, WEIGHTS_NAME, read_adapter_config
from soupkit.adapter_layout import Module, ModuleKind, Unit, units_of
from soupkit.adapter_write import write_adapter
from soupkit.errors import CheckpointError
from soupkit.files import canonical_json, fault_text, file_digest, open_regular
from soupkit.lora_kinds import expert_pairs, pair_of
from soupkit.numeric import check_finite
from soupkit.streaming import read_checked
from soupkit.tensorfile import Slot, read_header, typed

__all__ = [
    "AdapterFolder",
    "AdapterInfo",
    "Module",
    "ModuleInfo",
    "ModuleKind",
    "open_adapter",
    "write_adapter",
]

_PICKLE_NAME = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """What is known of a module without reading it: shape [out, in] of its delta; dtype: the wider
    of its two factors'.
    """

    kind: ModuleKind
    shape: tuple[int, int]
    rank: int
    scale: float
    dtype: torch.dtype
    kernel: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AdapterInfo:
    """What is known of an adapter without reading its weights.

    Attributes:
        path: the folder.
        base, revision: of the base model, as the config says; None where it does not.
        modules: by name, sorted.
        nbytes: of the weights file.
        carried: fields of the config that a copy needs beside its modules; see `write_adapter`.
        is_named: whether the file's tensors have the names that PEFT looks for; it passes over all
            others (without a prefix, with an adapter's name) in silence.
    """

    path: Path
    base: str | None
    revision: str | None
    modules: Mapping[str, ModuleInfo]
    nbytes: int
    carried: Mapping[str, Any]
    is_named: bool

    def digest(self) -> str:
        """ "sha256:<hex>" over both files as they are now. Raises CheckpointError."""
        with _faults_of(self.path):
            found = [file_digest(self.path / name) for name in (CONFIG_NAME, WEIGHTS_NAME)]
        return f"sha256:{hashlib.sha256(canonical_json(found).encode()).hexdigest()}"


class AdapterFolder:
    """An adapter folder that was opened and checked; its factors are read when asked for.

    Attributes:
        info: what is known without reading them.
    """

    def __init__(
        self, info: AdapterInfo, units: Iterable[Unit], slots: Mapping[str, Slot], stamp: object
    ) -> None:
        """For open_adapter only."""
        self.info = info
        self._slots = slots
        self._stamp = stamp
        self._unit_of = {name: unit for unit in units for name in unit.names}
        # Experts are stored together: the last ones read, so that each costs one reading.
        self._experts: tuple[Unit, dict[str, Module]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the modules, sorted; experts in their order."""
        return tuple(self.info.modules)

    @property
    def nbytes(self) -> int:
        """Of the weights file."""
        return self.info.nbytes

    def module(self, name: str) -> Module:
        """Read the factors of one module, in their own dtypes, into memory of their own (experts of
        one parameter share it).

        Raises:
            CheckpointError: no such module, or the file is gone, damaged or another one by now.
            MergeError: an entry is not finite.
        """
        unit = self._unit_of.get(name)
        if unit is None:
            raise CheckpointError(f"{self.info.path}: the adapter has no module {name!r}")
        held = self._experts
        if held is not None and held[0] is unit:
            return held[1][name]
        found = self._read(unit)
        if unit.experts is not None:
            self._experts = unit, found
        return found[name]

    def load(self) -> dict[str, Module]:
        """Read every module. Raises as `module`."""
        found: dict[str, Module] = {}
        for unit in dict.fromkeys(self._unit_of.values()):
            found |= self._read(unit)
        return found

    def _read(self, unit: Unit) -> dict[str, Module]:
        path = self.info.path / WEIGHTS_NAME
        with _faults_of(path), open_regular(path) as file:
            if _stamp(os.fstat(file.fileno())) != self._stamp:
                raise ValueError("has changed since it was opened; open the adapter again")
            a, b = (self._tensor(path, name, file.fileno()) for name in (unit.a, unit.b))
        if unit.experts is not None:
            pairs = expert_pairs(a, b, unit.scale, rank=unit.rank)
            return {
                name: Module("expert", pair) for name, pair in zip(unit.names, pairs, strict=True)
            }
        assert unit.kind != "expert"
        return {unit.module: Module(unit.kind, pair_of(unit.kind, a, b, unit.scale), unit.kernel)}

    def _tensor(self, path: Path, name: str, descriptor: int) -> Tensor:
        slot = self._slots[name]
        buffer = torch.empty(slot.spec.nbytes, dtype=torch.uint8)
        _, is_finite = read_checked(descriptor, slot, buffer, check=False)
        tensor = typed(buffer, slot.spec)
        if not is_finite:
            check_finite(name, tensor, file=path)
        return tensor


def open_adapter(folder: str | Path) -> AdapterFolder:
    """Open a PEFT adapter folder; checks the config and the header, reads no weight.

    Raises:
        CheckpointError: files are missing, damaged or lead elsewhere; or the adapter is more than
            plain LoRA, named with the remedy.
    """
    folder = Path(os.path.expanduser(folder))
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder: give the one that PEFT wrote")
    config = read_adapter_config(_file(folder, CONFIG_NAME))
    path = _file(folder, WEIGHTS_NAME)
    with _faults_of(path):
        found = path.stat()
        slots = read_header(path)
        units = units_of(config, {name: slot.spec for name, slot in slots.items()})
    info = AdapterInfo(
        path=folder,
        base=config.base,
        revision=config.revision,
        modules=MappingProxyType(
            {name: _info_of(unit, slots) for unit in units for name in unit.names}
        ),
        nbytes=found.st_size,
        carried=MappingProxyType(dict(config.carried)),
        is_named=all(unit.is_named for unit in units),
    )
    return AdapterFolder(info, units, slots, _stamp(found))


def _info_of(unit: Unit, slots: Mapping[str, Slot]) -> ModuleInfo:
    dtype = torch.promote_types(slots[unit.a].spec.dtype, slots[unit.b].spec.dtype)
    return ModuleInfo(unit.kind, unit.shape, unit.rank, unit.scale, dtype, unit.kernel)


def _stamp(found: os.stat_result) -> tuple[int, int, int, int]:
    """What tells one content of a file from another."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _file(folder: Path, name: str) -> Path:
    """A file of the folder that does not lead out of it, save into the hub cache's blobs."""
    path = folder / name
    if path.is_symlink():
        home, target = folder.resolve(), path.resolve()
        blobs = home.parent.parent / "blobs"
        is_hub = home.parent.name == "snapshots" and target.parent == blobs
        if not is_hub and not target.is_relative_to(home):
            raise CheckpointError(
                f"{path} is a link to {target}, outside of the folder: put a copy in its place"
            )
    if path.exists():
        return path
    if name == WEIGHTS_NAME and (folder / _PICKLE_NAME).exists():
        raise CheckpointError(
            f"{folder / _PICKLE_NAME} is a pickle, which is not read: load it in PEFT and "
            f"save_pretrained() it again, which writes {WEIGHTS_NAME}"
        )
    raise CheckpointError(
        f"{folder}: no {name}: give the folder that PEFT's save_pretrained wrote (a named adapter "
        "lies in a folder of its name)"
    )


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn what reading a hostile file can raise into a CheckpointError that names the file."""
    try:
        yield
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        raise CheckpointError(fault_text(error, path)) from error
