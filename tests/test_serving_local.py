"""`running`: a server for as long as a `with` block."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest
import serving_kit

from soupkit.errors import ServingError
from soupkit.serving.local import running


def test_a_family_is_served_inside_the_block_and_not_after_it(tmp_path: Path) -> None:
    family = serving_kit.make_family(tmp_path, names=("linear",)) / "family"
    with (
        running(family, log=tmp_path / "serve.log") as url,
        urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer,
    ):
        assert b'"linear"' in answer.read()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/v1/models", timeout=5)
    assert "soupkit serves" in (tmp_path / "serve.log").read_text()


def test_a_server_that_cannot_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(ServingError, match=r"stopped \(exit 1\).*nowhere is no family"),
        running(tmp_path / "nowhere"),
    ):
        pytest.fail("the block must not run")
