"""Merges inside a training run: `SoupCallback` for Trainer; `Soup` for Accelerate, DeepSpeed
engines and plain loops. `KMergeCallback` for Trainer: the run's LoRA adapter goes into a pool.

Names are imported on first use, so that a plain loop needs neither transformers nor accelerate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soupkit.training.accelerate import Soup
    from soupkit.training.pool_callback import KMergeCallback
    from soupkit.training.report import MergeReport
    from soupkit.training.trainer import SoupCallback

__all__ = ["KMergeCallback", "MergeReport", "Soup", "SoupCallback"]


def __getattr__(name: str) -> Any:
    """Import the module that a public name lives in."""
    if name == "SoupCallback":
        from soupkit.training.trainer import SoupCallback

        return SoupCallback
    if name == "Soup":
        from soupkit.training.accelerate import Soup

        return Soup
    if name == "KMergeCallback":
        from soupkit.training.pool_callback import KMergeCallback

        return KMergeCallback
    if name == "MergeReport":
        from soupkit.training.report import MergeReport

        return MergeReport
    raise AttributeError(f"module 'soupkit.training' has no attribute {name!r}")
