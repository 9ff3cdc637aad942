"""A variant in the making: finished parameters, spooled, and a journal by which an export that was
interrupted goes on.

    family/variants/.partial-<name>/spool      bytes of the stored tensors, one after the other
    family/variants/.partial-<name>/journal    a line that says of which export, then one for each
                                               finished parameter: check, entry, sha256 of its parts

Nothing is synced: whatever a kill, a full disk or a power loss left is checked against the journal,
and everything behind the last parameter that is whole is cut off. No reader of a family looks here.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from soupkit.checkpoint import Checkpoint
from soupkit.files import canonical_json, open_regular
from soupkit.fingerprint import Entry, digest_of
from soupkit.manifest import TensorEntry
from soupkit.shards import SpooledFile
from soupkit.stored import Finished
from soupkit.tensorfile import DTYPES, TensorSpec
from soupkit.version import __version__
from soupkit.workers import Workers

# Of a fine-tune whose export is worth going on with: a smaller one takes a second or two.
LEAST_BYTES = 2**30
_SCHEMA = 1
_SPOOL_NAME, _JOURNAL_NAME = "spool", "journal"
_CHECK_DIGITS = 16
_PIECE_BYTES = 2**20


def is_worth_keeping(finetuned: Checkpoint) -> bool:
    """Whether what is done of this fine-tune's export outlives an interruption."""
    return sum(finetuned.spec(name).nbytes for name in finetuned.names) >= LEAST_BYTES


def key_of(fingerprint: str, finetuned: Checkpoint, encodings: Mapping[str, str]) -> str:
    """What an export must have in common with the one that it goes on with.

    Args:
        fingerprint: of the base. encodings: names of Encodings by parameter.
    """
    asked = {
        "schema": _SCHEMA,
        "entry": list(TensorEntry.__dataclass_fields__),
        "base": fingerprint,
        "files": sorted(finetuned.stamps),
        "names": finetuned.names,
        "tied": finetuned.tied,
        "encodings": dict(encodings),
        "versions": [__version__, torch.__version__, torch.backends.cpu.get_cpu_capability()],
    }
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


class VariantSpool:
    """The finished parameters of a variant; see the module."""

    def __init__(self, path: Path, *, kept: Path | None = None, key: str = "") -> None:
        """Start, or go on.

        Args:
            path: of variant.safetensors.
            kept: folder for the spool and the journal, held by this process alone; it stays. None:
                nothing outlives an interruption.
            key: see key_of. What the folder holds of another key is overwritten.
        """
        self._done: dict[str, tuple[TensorEntry, tuple[Entry, ...]]] = {}
        self._journal: int | None = None
        if kept is None:
            self._file = SpooledFile(path)
            return
        head = _line({"key": key})
        size = len(head)
        for found, length in _whole_lines(kept, head):
            self._done[found.entry.name] = (found.entry, found.hashes)
            size += length
        held = ((name, _spec(one)) for name, one in _by_name(self._done.values()))
        self._file = SpooledFile(path, spool=kept / _SPOOL_NAME, held=held)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._journal = os.open(kept / _JOURNAL_NAME, flags, 0o644)
            if not self._done:
                os.ftruncate(self._journal, 0)
                _append(self._journal, head)
            os.ftruncate(self._journal, size)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that are finished."""
        return tuple(self._done)

    def add(self, one: Finished) -> None:
        """Store a finished parameter. Raises OSError."""
        for (name, *_), part in zip(one.hashes, one.parts, strict=True):
            self._file.add(name, part)
        if self._journal is not None:
            _append(self._journal, _line({"entry": asdict(one.entry), "stored": one.hashes}))
        self._done[one.entry.name] = (one.entry, one.hashes)

    def finish(self, more: Sequence[TensorEntry]) -> tuple[tuple[TensorEntry, ...], str]:
        """Write variant.safetensors; returns all entries, sorted, and the content digest."""
        self._file.finish()
        entries = [*(entry for entry, _ in self._done.values()), *more]
        entries.sort(key=lambda entry: entry.name)
        return tuple(entries), digest_of(one for _, one in _by_name(self._done.values()))

    def close(self) -> None:
        """Let go of the files; without a kept folder, drop what is unfinished."""
        self._file.close()
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None


def _by_name(
    done: Iterable[tuple[TensorEntry, tuple[Entry, ...]]],
) -> Iterator[tuple[str, Entry]]:
    """All stored tensors in the order of the spool."""
    return ((one[0], one) for _, hashes in done for one in hashes)


def _spec(one: Entry) -> TensorSpec:
    return TensorSpec(DTYPES[one[1]], one[2])


def _line(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, allow_nan=False)
    return f"{_check(text.encode())} {text}\n".encode()


def _check(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:_CHECK_DIGITS]


def _append(descriptor: int, line: bytes) -> None:
    done = 0
    while done < len(line):
        done += os.write(descriptor, line[done:])


def _whole_lines(kept: Path, head: bytes) -> Iterator[tuple[Finished, int]]:
    """The parameters that the folder holds whole up to the first that it does not, with the bytes
    of their lines; nothing if the journal is of another export.
    """
    try:
        with open_regular(kept / _JOURNAL_NAME) as file:
            lines = file.read().splitlines(keepends=True)
        spool = open_regular(kept / _SPOOL_NAME)
    except OSError:
        return
    with spool, Workers() as workers:
        if not lines or lines[0] != head:
            return
        told = _located(lines[1:])
        checks = workers.stream(lambda one: (one, _is_whole(spool.fileno(), *one[:2])), told)
        for (found, _, length), is_whole in checks:
            if not is_whole:
                return
            yield found, length


def _located(lines: Sequence[bytes]) -> Iterator[tuple[Finished, int, int]]:
    """Parameters of a journal, where their parts begin in the spool, and the bytes of their line;
    up to the first line that is torn.
    """
    start = 0
    for line in lines:
        check, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or check != _check(text).encode():
            return
        value = json.loads(text)
        entry = TensorEntry(**{**value["entry"], "shape": tuple(value["entry"]["shape"])})
        hashes = tuple(
            (name, dtype, tuple(shape), sha) for name, dtype, shape, sha in value["stored"]
        )
        yield Finished(entry, (), hashes), start, len(line)
        start += sum(_spec(one).nbytes for one in hashes)


def _is_whole(descriptor: int, one: Finished, start: int) -> bool:
    """Whether the spool holds the parts of a parameter, from `start` on."""
    for stored in one.hashes:
        stop, digest = start + _spec(stored).nbytes, hashlib.sha256()
        while start < stop:
            piece = os.pread(descriptor, min(_PIECE_BYTES, stop - start), start)
            if not piece:
                return False
            digest.update(piece)
            start += len(piece)
        if digest.hexdigest() != stored[3]:
            return False
    return True
