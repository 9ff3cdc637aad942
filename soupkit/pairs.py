"""Which parameter of a fine-tune meets which of its base, and whether the two have a delta."""

from collections.abc import Iterator
from contextlib import contextmanager

from soupkit.checkpoint import INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS, Checkpoint
from soupkit.delta import TensorSource
from soupkit.errors import CheckpointError, MergeError
from soupkit.numeric import check_finite
from soupkit.tensorfile import dtype_name


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
