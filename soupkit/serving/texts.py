"""What turns each model's tokens into text: the base's files, or a variant's own where it has some.

How the files are read is given from outside, so that nothing here knows transformers.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from soupkit.bundle import VariantRef, open_variant
from soupkit.checkpoint import Checkpoint
from soupkit.errors import BundleError, ServingError

from .catalog import Catalog

# Settings of config.json that do not change what a forward pass computes.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "num_labels",
        "pad_token_id",
        "problem_type",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


class Texts:
    """Tokenizer, stop tokens and configuration of every model, read once a version."""

    def __init__(self, catalog: Catalog, base: Checkpoint, read: Callable[[Path], Any]) -> None:
        self.base = read(base.path)
        self._catalog, self._files, self._read = catalog, base.files(), read
        self._known: dict[tuple[str, str], Any] = {}

    async def of(self, ref: VariantRef | None) -> Any:
        """The text setup of a variant, or of the base for None.

        Raises:
            SoupkitError: its files cannot be read, or say that it is another architecture.
        """
        if ref is None:
            return self.base
        key = (ref.path, ref.digest)
        if key not in self._known:
            # Not on the threads that load weights: a slow load must not delay another variant.
            found = await asyncio.to_thread(self._read_variant, ref)
            live = {(r.path, r.digest) for r in self._catalog.variants.values()}
            self._known = {k: v for k, v in self._known.items() if k in live} | {key: found}
        return self._known[key]

    def _read_variant(self, ref: VariantRef) -> Any:
        folder = self._catalog.family.folder(ref.name)
        manifest = open_variant(folder).manifest
        if manifest.digest != ref.digest:
            raise BundleError(f"variant {ref.name!r} is being replaced; try again")
        if not manifest.companions:
            return self.base
        found = _with_companions(self._files, folder, manifest.companions, self._read)
        _check_config(found.config, self.base.config, name=ref.name)
        return found


def _with_companions(
    files: dict[str, Path], folder: Path, names: Iterable[str], read: Callable[[Path], Any]
) -> Any:
    """Calls `read` on a folder of the base's files with those of a variant in their place."""
    files = files | {name: folder / name for name in names}
    with tempfile.TemporaryDirectory(prefix="soupkit-text-") as overlay:
        for name, path in files.items():
            (Path(overlay) / name).symlink_to(path.resolve())
        return read(Path(overlay))


def _check_config(variant: dict[str, Any], base: dict[str, Any], *, name: str) -> None:
    """Refuses a variant whose configuration makes the model compute something else.

    Raises:
        ServingError: naming the first setting that differs.
    """
    for key in sorted(variant.keys() | base.keys()):
        if key in HARMLESS or "dropout" in key or variant.get(key) == base.get(key):
            continue
        raise ServingError(
            f"variant {name!r}: config.json sets {key}={variant.get(key)!r}, the base "
            f"{base.get(key)!r}; it cannot share a batch with the base: serve the restored model"
        )
