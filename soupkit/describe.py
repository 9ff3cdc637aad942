"""What `soupkit inspect` tells: a family, one of its variants, a pool of adapters, or a checkpoint,
as one JSON document.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from soupkit.bundle import Variant, open_family, open_variant
from soupkit.checkpoint import Checkpoint, checkpoint_fingerprint, open_checkpoint
from soupkit.errors import SoupkitError
from soupkit.family import FAMILY_NAME
from soupkit.manifest import MANIFEST_NAME, itemise, model_bf16_bytes
from soupkit.pool import AdapterPool
from soupkit.pool_manifest import POOL_NAME


def describe(path: str | Path) -> dict[str, Any]:
    """Describe what lies at `path`.

    Returns:
        {"kind": "family" | "variant" | "pool" | "checkpoint", ...}, JSON types only. A variant of a
        family that cannot be opened has only a "fault".

    Raises:
        BundleError, PoolError, CheckpointError: it is none of the four, or damaged.
    """
    path = Path(path)
    if (path / FAMILY_NAME).exists():
        return _family(path)
    if (path / MANIFEST_NAME).exists():
        return {"kind": "variant", "path": str(path), **_variant(open_variant(path))}
    if (path / POOL_NAME).exists():
        return AdapterPool(path).to_json()
    return _checkpoint(open_checkpoint(path))


def _family(path: Path) -> dict[str, Any]:
    family = open_family(path)
    variants: dict[str, Any] = {}
    for name, ref in family.variants.items():
        try:
            variants[name] = {"path": ref.path, **_variant(open_variant(family.folder(name)))}
        except SoupkitError as error:
            variants[name] = {"path": ref.path, "fault": str(error)}
    return {"kind": "family", "path": str(path), "base": asdict(family.base), "variants": variants}


def _variant(variant: Variant) -> dict[str, Any]:
    manifest = variant.manifest
    return {
        "name": manifest.name,
        "digest": manifest.digest,
        "base_fingerprint": manifest.base_fingerprint,
        "bytes": itemise(variant.path, manifest.tensors),
        "model_bf16_bytes": model_bf16_bytes(manifest.tensors),
        "companions": dict(manifest.companions),
        "history": [dict(event) for event in manifest.history],
        "metrics": dict(manifest.metrics),
        "budget": dict(manifest.budget),
        "versions": dict(manifest.versions),
        "tensors": [asdict(entry) for entry in manifest.tensors],
    }


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors = {
        name: {
            "shape": list(checkpoint.shape(name)),
            "dtype": str(checkpoint.dtype(name)).removeprefix("torch."),
            "bytes": checkpoint.spec(name).nbytes,
        }
        for name in checkpoint.names
    }
    return {
        "kind": "checkpoint",
        "path": str(checkpoint.path),
        "fingerprint": checkpoint_fingerprint(checkpoint),
        "bytes": {"total": sum(checkpoint.spec(name).nbytes for name in checkpoint.names)},
        "tied": dict(checkpoint.tied),
        "tensors": tensors,
    }
