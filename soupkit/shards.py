"""Writing tensors that come one by one: one safetensors file, or a model folder's shards and index.

No tensor is held. What is not known beforehand goes to a spool file first and is copied behind its
header, inside the kernel where it can, when the file is complete. A model's shapes are known: its
entries are written to their place. Not atomic: write into soupkit.files.atomic_folder.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from soupkit.files import atomic_write_json
from soupkit.tensorfile import PIECE_BYTES, TensorFileWriter, TensorSpec, as_bytes

MAX_SHARD_BYTES = 5_000_000_000


class SpooledFile:
    """One safetensors file in the making; `nbytes` counts the data so far."""

    def __init__(
        self,
        path: Path,
        *,
        spool: Path | None = None,
        held: Iterable[tuple[str, TensorSpec]] = (),
    ) -> None:
        """Start a file.

        Args:
            path: of the file to be.
            spool: where the bytes lie until finish(); it stays there. None: hidden beside `path`,
                and removed in the end.
            held: names and specs of what the given spool holds already, in order; what lies behind
                that is cut off.
        """
        self.nbytes = 0
        self._path = path
        self._is_own = spool is None
        self._spool_path = spool or path.with_name(f".{path.name}.spool")
        self._entries: dict[str, tuple[TensorSpec, int]] = {}
        for name, spec in held:
            self._entries[name] = (spec, self.nbytes)
            self.nbytes += spec.nbytes
        mode = "rb+" if self._entries else "xb+" if self._is_own else "wb+"
        self._spool = open(self._spool_path, mode, buffering=0)  # noqa: SIM115 - closed by finish()
        self._spool.truncate(self.nbytes)

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of that name was added."""
        return name in self._entries

    @property
    def names(self) -> tuple[str, ...]:
        """Names added so far, in order."""
        return tuple(self._entries)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor; it may be changed or freed afterwards.

        Raises:
            OSError: the disk refused.
            ValueError: the name was added before.
        """
        self.add_pieces(name, TensorSpec(tensor.dtype, tuple(tensor.shape)), [tensor])

    def add_pieces(self, name: str, spec: TensorSpec, pieces: Iterable[Tensor]) -> None:
        """Append one tensor given as consecutive pieces of its entries.

        Raises:
            OSError: the disk refused.
            ValueError: the name was added before, or the pieces are not the tensor that `spec`
                says.
        """
        if name in self._entries:
            raise ValueError(f"{name} was written before")
        end = self.nbytes
        for piece in pieces:
            if piece.dtype != spec.dtype:
                raise ValueError(f"{name}: a piece is {piece.dtype}, announced as {spec.dtype}")
            end += self._write(piece, end)
        if end - self.nbytes != spec.nbytes:
            raise ValueError(f"{name}: {end - self.nbytes} bytes came, {spec} needs {spec.nbytes}")
        self._entries[name] = (spec, self.nbytes)
        self.nbytes = end

    def _write(self, tensor: Tensor, offset: int) -> int:
        data = as_bytes(tensor)
        done = 0
        while done < len(data):
            piece = data[done : done + PIECE_BYTES]
            done += os.pwrite(self._spool.fileno(), piece, offset + done)
        return done

    def finish(self, *, metadata: Mapping[str, str] | None = None) -> None:
        """Write the file and drop the spool. Raises OSError."""
        specs = {name: spec for name, (spec, _) in self._entries.items()}
        writer = TensorFileWriter(self._path, specs, metadata=metadata)
        try:
            for name, (_, offset) in self._entries.items():
                writer.copy(name, self._spool.fileno(), offset)
            writer.check_complete()
        finally:
            writer.close()
            self.close()

    def close(self) -> None:
        """Drop the spool, or only let go of a given one; for the way out of an error, and harmless
        after finish().
        """
        self._spool.close()
        if self._is_own:
            self._spool_path.unlink(missing_ok=True)


class ShardWriter:
    """Writes `<stem>.safetensors`, or `<stem>-00001-of-00003.safetensors` ... and their index, of
    tensors that are known beforehand; their entries may come in any order and from any thread.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        *,
        stem: str = "model",
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Plan the files, in the order of `specs`, and write their headers.

        Args:
            folder: exists and has no files of this stem.
            specs: at least one.
            stem: start of the file names.
            max_shard_bytes: of the data of one file; a larger tensor gets a file of its own.

        Raises:
            OSError: the disk refused.
            ValueError: no tensor, or a limit below 1.
        """
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_shard_bytes}: must be >= 1")
        if not specs:
            raise ValueError(f"{folder}: no tensor for {stem}")
        self._index = folder / f"{stem}.safetensors.index.json"
        shards = _planned(specs, max_shard_bytes)
        count = len(shards)
        names = [f"{stem}-{number:05d}-of-{count:05d}" for number in range(1, count + 1)]
        self._paths = [folder / f"{name}.safetensors" for name in (names if count > 1 else [stem])]
        self._total_bytes = sum(spec.nbytes for spec in specs.values())
        self._writers: list[TensorFileWriter] = []
        self._shard_of: dict[str, int] = {}
        try:
            for number, shard in enumerate(shards):
                # transformers refuses weights whose metadata does not say who wrote them.
                writer = TensorFileWriter(self._paths[number], shard, metadata={"format": "pt"})
                self._writers.append(writer)
                self._shard_of |= dict.fromkeys(shard, number)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, tensor: Tensor, *, first_entry: int = 0) -> None:
        """Write some consecutive entries of a tensor, as TensorFileWriter.write."""
        self._writers[self._shard_of[name]].write(name, tensor, first_entry=first_entry)

    def finish(self) -> tuple[Path, ...]:
        """Close the files and write their index, if there are several.

        Returns:
            The weight files in order.

        Raises:
            OSError: the disk refused.
            ValueError: entries are missing.
        """
        for writer in self._writers:
            writer.check_complete()
        self.close()
        if len(self._paths) > 1:
            shard_of = sorted(self._shard_of.items())
            weight_map = {name: self._paths[shard].name for name, shard in shard_of}
            atomic_write_json(
                self._index,
                {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map},
            )
        return tuple(self._paths)

    def close(self) -> None:
        """Close the files as they are; for the way out of an error, and harmless after finish()."""
        for writer in self._writers:
            writer.close()


def _planned(specs: Mapping[str, TensorSpec], most: int) -> list[dict[str, TensorSpec]]:
    """The tensors of each file, filled in order."""
    shards: list[dict[str, TensorSpec]] = []
    free = 0
    for name, spec in specs.items():
        if not shards or spec.nbytes > free:
            shards.append({})
            free = most
        shards[-1][name] = spec
        free -= spec.nbytes
    return shards
