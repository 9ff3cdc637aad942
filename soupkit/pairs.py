"""Which parameter of a fine-tune meets which of its base, whether the two have a delta, and who
reads them: of files the thread that works on them, of a run's own weights the caller's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from soupkit.checkpoint import INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS, Checkpoint
from soupkit.delta import TensorSource
from soupkit.errors import CheckpointError, MergeError
from soupkit.numeric import check_finite
from soupkit.tensorfile import TensorSpec, dtype_name
from soupkit.window import Job

T = TypeVar("T")
# What a thread takes for blocks of rows, whatever the tensor.
_BLOCKS_BYTES = 2**26
# Of all jobs under way: where the source's tensors are memory, where they are mapped, and where
# matrices are held whole for an SVD.
_MOST_BYTES = 2**29
_MOST_MAPPED_BYTES = 2**30
_MOST_SVD_BYTES = 2**32


def pair_names(base: Checkpoint, finetuned: TensorSource) -> list[tuple[str, str]]:
    """(name in the fine-tune, name in the base) of every parameter that the variant describes.

    Raises:
        CheckpointError: a parameter is missing, unknown, or of a shape or dtype that has no delta.
    """
    tied = getattr(finetuned, "tied", {})
    missing = [name for name in base.names if name not in finetuned.names and name not in tied]
    if missing:
        raise CheckpointError(
            f"{_told(finetuned)} lacks {missing[0]!r} ({len(missing)} in all) that the base has; "
            "is it a fine-tune of this base?"
        )
    unknown = [name for name in finetuned.names if name not in base.names and name not in base.tied]
    if unknown:
        raise CheckpointError(
            f"{_told(finetuned)} has {unknown[0]!r} ({len(unknown)} in all), which the base lacks; "
            "a variant can only change parameters of its base"
        )
    # A head that the fine-tune tied to its input but the base did not is told by its own delta.
    names = sorted({*finetuned.names, *(name for name in tied if name in base.names)})
    for name in names:
        _check_pair(name, base, finetuned)
    return [(name, name) for name in names]


def spec_of(source: TensorSource, name: str) -> TensorSpec:
    """Dtype and shape of one tensor of a source, without reading it."""
    return TensorSpec(source.dtype(name), source.shape(name))


def most_bytes(finetuned: TensorSource, *, has_svd: bool) -> int:
    """Memory that the jobs of `pair_jobs` may take together."""
    if has_svd:
        return _MOST_SVD_BYTES
    return _MOST_MAPPED_BYTES if isinstance(finetuned, Checkpoint) else _MOST_BYTES


def pair_jobs(
    base: Checkpoint,
    finetuned: TensorSource,
    pairs: Sequence[tuple[str, str]],
    act: Callable[[str, Tensor, Tensor], T],
    *,
    nbytes: Callable[[str], int],
) -> Iterator[Job[T]]:
    """One job for each pair of names: `act` of the name, the fine-tune's tensor and the base's.

    Those of a Checkpoint are read by the threads, the largest first, and the disk is told before.
    Those of another source are asked for when the job begins, in the order of `pairs`: that may be
    collective.

    Args:
        nbytes: memory that `act` of that name takes beside blocks of rows.
    """
    is_mapped = isinstance(finetuned, Checkpoint)
    if is_mapped:
        pairs = sorted(pairs, key=lambda pair: -math.prod(finetuned.shape(pair[0])))
    for ours, theirs in pairs:
        begin = partial(_begin, base, finetuned, ours, theirs, act)
        size = nbytes(ours) + (0 if is_mapped else spec_of(finetuned, ours).nbytes)
        yield Job(size + _BLOCKS_BYTES, begin)


def _begin(
    base: Checkpoint,
    finetuned: TensorSource,
    ours: str,
    theirs: str,
    act: Callable[[str, Tensor, Tensor], T],
) -> Callable[[], T]:
    base.prefetch(theirs)
    asked: Tensor | None = None
    if isinstance(finetuned, Checkpoint):
        finetuned.prefetch(ours)
    else:
        asked = finetuned.tensor(ours)

    # The caller's is not that of its threads.
    @torch.no_grad()
    def run() -> T:
        with naming_the_culprit(ours, base, finetuned):
            mine = finetuned.tensor(ours) if asked is None else asked
            return act(ours, mine, base.tensor(theirs))

    return run


@contextmanager
def naming_the_culprit(name: str, *sources: TensorSource) -> Iterator[None]:
    """Let a MergeError about the parameter `name` tell where which checkpoint is not finite."""
    try:
        yield
    except MergeError:
        for source in sources:
            # Other sources are a run's own weights: only one is told apart, and a gather is dear.
            if isinstance(source, Checkpoint):
                check_finite(name, source.tensor(name), file=source.path)
        raise


def _told(finetuned: TensorSource) -> str:
    return str(finetuned.path) if isinstance(finetuned, Checkpoint) else "the fine-tune"


def _check_pair(name: str, base: Checkpoint, finetuned: TensorSource) -> None:
    ours, theirs = finetuned.shape(name), base.shape(name)
    floats = finetuned.dtype(name).is_floating_point, base.dtype(name).is_floating_point
    if floats[0] != floats[1]:
        raise CheckpointError(
            f"{_told(finetuned)}: {name}: {finetuned.dtype(name)} against {base.dtype(name)} in "
            "the base"
        )
    dtype_name(finetuned.dtype(name))
    is_resized = len(ours) == len(theirs) and len(ours) in (1, 2) and ours[1:] == theirs[1:]
    if ours != theirs and not (is_resized and _is_vocabulary(name, theirs[0], base)):
        raise CheckpointError(
            f"{_told(finetuned)}: {name}: shape {ours} against {theirs} in the base; only "
            "the vocabulary (the first axis of an embedding or head) may differ"
        )


def _is_vocabulary(name: str, rows: int, base: Checkpoint) -> bool:
    """Whether the first axis of a parameter, of that length in the base, is the vocabulary."""
    configs = (base.config, base.config.get("text_config"))
    sizes = [one.get("vocab_size") for one in configs if isinstance(one, dict)]
    return rows in sizes or name.endswith(INPUT_EMBEDDINGS + OUTPUT_EMBEDDINGS)
