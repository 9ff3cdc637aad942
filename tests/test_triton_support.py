"""Which layers can take the Triton kernels; a GPU is played, as there is none in CI."""

import importlib.metadata
from collections.abc import Iterator

import pytest
import torch

from soupkit_kernels import triton_support
from soupkit_kernels.triton_support import why_not

FITS = ("cuda:0", torch.bfloat16, 4096, 1)


@pytest.fixture(autouse=True)
def _an_h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SOUPKIT_KERNEL", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.6.0")
    for cached in (triton_support._installed, triton_support._able):
        cached.cache_clear()
    yield
    for cached in (triton_support._installed, triton_support._able):
        cached.cache_clear()


def test_a_layer_of_a_language_model_can() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert why_not("cuda:0", dtype, 4096, 4) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("cpu", *FITS[1:]), "tensors on cpu"),
        ((*FITS[:1], torch.float64, *FITS[2:]), "float64"),
        ((*FITS[:2], 1000 + 1, 1), "in_features 1001 is no multiple of 16"),
        ((*FITS[:3], 5), "5 planes, more than 4"),
    ],
)
def test_others_are_told_why(arguments: tuple[object, ...], reason: str) -> None:
    assert reason in str(why_not(*arguments))  # type: ignore[arg-type]


def test_the_machine_may_be_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOUPKIT_KERNEL", "torch")
    assert why_not(*FITS) == "SOUPKIT_KERNEL=torch"
    monkeypatch.delenv("SOUPKIT_KERNEL")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "7.5: needs 8.0" in str(why_not(*FITS))
    triton_support._able.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in str(why_not(*FITS))


@pytest.mark.parametrize("version", ["3.5.1", "2.10.0"])
def test_an_old_triton_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert f"triton {version}: needs 3.6" in str(why_not(*FITS))


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "pip install triton" in str(why_not(*FITS))
