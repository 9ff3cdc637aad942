"""A LoRA adapter as a variant that a server takes beside packed ones: factors alone, no signs.

    delta = (scale b) a;    up = scale b,  down = a,  both float32

Linear layers and embeddings, each by itself: PEFT computes the delta of an embedding beside the
weight, so a head that the base ties to it does not change. What else an adapter may hold
(convolutions, single experts) is refused by name. Not here: files of a bundle, and whether the base
has the modules.
"""

from soupkit.adapter_folder import AdapterFolder, AdapterInfo, ModuleInfo
from soupkit.bundle import LoadedVariant
from soupkit.errors import BundleError
from soupkit.manifest import Manifest, TensorEntry
from soupkit_kernels import Delta


def adapter_manifest(
    info: AdapterInfo, *, name: str, base_fingerprint: str, digest: str
) -> Manifest:
    """What a variant's manifest would say; no weight is read.

    Args:
        name: of the variant. base_fingerprint: of the base that it is served with. digest: of the
            adapter.
    Raises:
        BundleError: a module that has no place in a variant.
    """
    entries = tuple(_entry(info, module, found) for module, found in info.modules.items())
    return Manifest(name, base_fingerprint, digest, entries, per_module=True)


def load_adapter(adapter: AdapterFolder, manifest: Manifest) -> LoadedVariant:
    """The whole adapter in host memory.

    Raises:
        CheckpointError: it is damaged, or another one by now. MergeError: it is not finite.
    """
    deltas: dict[str, Delta] = {}
    for name, entry in zip(adapter.names, manifest.tensors, strict=True):
        pair = adapter.module(name).pair
        deltas[entry.name] = Delta(
            *pair.shape, up=pair.b.float() * pair.scale, down=pair.a.float()
        )  # fmt: skip
    nbytes = sum(entry.bytes for entry in manifest.tensors)
    return LoadedVariant(deltas, {}, manifest.digest, nbytes, manifest)


def _entry(info: AdapterInfo, module: str, found: ModuleInfo) -> TensorEntry:
    if found.kind not in ("linear", "embedding"):
        raise BundleError(
            f"{info.path}: {module!r} is a LoRA of kind {found.kind!r}, which cannot differ per "
            "token: merge it into the base and serve that"
        )
    return TensorEntry(
        name=f"{module}.weight",
        kind="delta",
        shape=found.shape,
        dtype="F32",
        bytes=4 * found.rank * sum(found.shape),
        rank=found.rank,
        encoding=f"lowrank-{found.rank}",
    )
