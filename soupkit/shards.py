"""Writing tensors that come one by one: one safetensors file, or a model folder's shards and index.

Nothing has to be known beforehand and no tensor is held: bytes go to a spool file first and are
copied behind their header, inside the kernel where it can, when the file is complete. Not atomic:
write into soupkit.files.atomic_folder.
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
    """Writes `<stem>.safetensors`, or `<stem>-00001-of-00003.safetensors` ... and their index."""

    def __init__(
        self, folder: Path, stem: str = "model", *, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        """Start a set of files.

        Args:
            folder: exists and has no files of this stem.
            stem: start of the file names.
            max_shard_bytes: of the data of one file; a larger tensor gets a file of its own.
        """
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_shard_bytes}: must be >= 1")
        self._folder = folder
        self._stem = stem
        self._max_shard_bytes = max_shard_bytes
        self._total_bytes = 0
        self._shards: list[Path] = []
        self._shard_of: dict[str, int] = {}
        self._open: SpooledFile | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor; it may be changed or freed afterwards.

        Raises:
            OSError: the disk refused.
            ValueError: the name was added before.
        """
        self.add_pieces(name, TensorSpec(tensor.dtype, tuple(tensor.shape)), [tensor])

    def add_pieces(self, name: str, spec: TensorSpec, pieces: Iterable[Tensor]) -> None:
        """Append one tensor given as consecutive pieces of its entries, such as blocks of rows.

        Raises:
            OSError: the disk refused.
            ValueError: the name was added before, or the pieces are not the tensor that `spec`
                says.
        """
        if name in self._shard_of:
            raise ValueError(f"{name} was written before")
        full = self._open is not None and self._open.nbytes + spec.nbytes > self._max_shard_bytes
        if full and self._open is not None and self._open.nbytes:
            self._finish_shard(self._open)
        if self._open is None:
            self._shards.append(self._folder / f".{self._stem}.part-{len(self._shards):05d}")
            self._open = SpooledFile(self._shards[-1])
        self._open.add_pieces(name, spec, pieces)
        self._shard_of[name] = len(self._shards) - 1
        self._total_bytes += spec.nbytes

    def close(self) -> tuple[Path, ...]:
        """Finish the last file, name the files and write the index.

        Returns:
            The weight files in order.

        Raises:
            OSError: the disk refused.
            ValueError: no tensor was added.
        """
        if self._open is None:
            raise ValueError(f"{self._folder}: no tensor was added to {self._stem}")
        self._finish_shard(self._open)
        if len(self._shards) == 1:
            paths = [self._folder / f"{self._stem}.safetensors"]
        else:
            count = len(self._shards)
            paths = [
                self._folder / f"{self._stem}-{number:05d}-of-{count:05d}.safetensors"
                for number in range(1, count + 1)
            ]
            weight_map = {name: paths[shard].name for name, shard in sorted(self._shard_of.items())}
            atomic_write_json(
                self._folder / f"{self._stem}.safetensors.index.json",
                {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map},
            )
        for part, path in zip(self._shards, paths, strict=True):
            os.rename(part, path)
        return tuple(paths)

    def abort(self) -> None:
        """Drop what is unfinished; for the way out of an error, and harmless after close()."""
        if self._open is not None:
            self._open.close()

    def _finish_shard(self, file: SpooledFile) -> None:
        # transformers refuses weights whose metadata does not say which framework wrote them.
        file.finish(metadata={"format": "pt"})
        self._open = None
