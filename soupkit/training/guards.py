"""What a merge must leave as it found it: random generators, modes, and nothing half done.

Context managers only; they know nothing of merges.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

import numpy
import torch


@contextlib.contextmanager
def preserved_rng(devices: Collection[torch.device], *, seed: int | None = None) -> Iterator[None]:
    """Put the global generators of torch, CUDA, numpy and Python back at the end.

    Args:
        devices: those whose CUDA generators are saved; others are ignored.
        seed: what the generators are set to inside; None: they run on from where they are.
    """
    cuda = [device for device in devices if device.type == "cuda"]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    torch_state = torch.get_rng_state()
    cuda_states = [torch.cuda.get_rng_state(device) for device in cuda]
    try:
        if seed is not None:
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        for device, state in zip(cuda, cuda_states, strict=True):
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into eval mode without gradients; give each module its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block is done, then deliver them; for short blocks.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    former: dict[signal.Signals, Any] = {}
    for kind in (signal.SIGINT, signal.SIGTERM):
        # None: installed from C, cannot be put back from here.
        if signal.getsignal(kind) is not None:
            former[kind] = signal.signal(kind, note)
    try:
        yield
    finally:
        for kind, handler in former.items():
            signal.signal(kind, handler)
        for number in caught:
            signal.raise_signal(number)
