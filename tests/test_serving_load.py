"""Loading beside an engine that generates: few threads, one buffer."""

from pathlib import Path

import pytest
from serving_kit import load_variant, make_family

from soupkit.serving import catalog


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("load"), names=("rich", "matrix"))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 1), (8, 3), (64, 8)])
def test_two_loads_leave_the_engine_a_core(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert catalog.load_threads() == threads


def test_the_tensors_of_a_variant_are_views_of_one_buffer(root: Path) -> None:
    loaded = load_variant(root, "rich")
    tensors = list(loaded.raw.values())
    for delta in loaded.deltas.values():
        parts = (delta.packed, delta.scale, delta.column_scale, delta.up, delta.down)
        tensors += [part for part in parts if part is not None]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert sum(tensor.nbytes for tensor in tensors) == loaded.nbytes
    assert tensors[0].untyped_storage().nbytes() == loaded.nbytes
