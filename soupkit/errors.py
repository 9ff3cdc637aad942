"""What can go wrong in the world, as exceptions.

    SoupkitError
    |-- CheckpointError   a model folder: missing, truncated, or two that do not fit
    |-- BundleError       a variant or a family on disk: hostile, truncated, of another base
    |-- PoolError         an adapter pool: damaged, full, or of another base
    |-- MergeError        deltas that cannot be merged: not finite, different shapes
    |-- TrainingError     a run that cannot be souped or resumed
    `-- ServingError      a server that cannot load or answer

A mistake of the caller (a bad argument) is a ValueError and not in this tree; an assert is a fault
of ours. Every message names the value, the limit and the remedy.
"""


class SoupkitError(Exception):
    """Root of all errors that soupkit raises about the world."""


class CheckpointError(SoupkitError):
    """A model folder cannot be read, or two of them do not belong together."""


class BundleError(SoupkitError):
    """A variant or a family on disk is damaged, hostile, or belongs to another base."""


class PoolError(SoupkitError):
    """A pool of adapters is damaged, has no place for one, or belongs to another base."""


class MergeError(SoupkitError):
    """Deltas cannot be computed or merged."""


class TrainingError(SoupkitError):
    """A training run cannot be merged into, saved or resumed."""


class ServingError(SoupkitError):
    """A variant cannot be served."""
