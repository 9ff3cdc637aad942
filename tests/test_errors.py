"""The exception tree."""

import pytest

from soupkit import errors


@pytest.mark.parametrize(
    "name",
    ["CheckpointError", "BundleError", "PoolError", "MergeError", "TrainingError", "ServingError"],
)
def test_every_error_is_a_soupkit_error_and_drawn_in_the_tree(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.SoupkitError)
    assert not issubclass(error, ValueError)
    assert errors.__doc__ is not None
    assert f"-- {name}" in errors.__doc__
