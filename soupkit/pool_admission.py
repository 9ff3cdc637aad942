"""Whether an adapter may come into a pool: of the same base as what is there, with modules that the
base has.

Bases are compared by the name that the adapters' configs give, and by the folder where that is one
here, or a hub's model of which there is a copy. Then a module's shape is compared with it, and a
module is refused whose last name no parameter of the base has; modules may be named otherwise there
than in the running model, so no more is asked. And whether a pool may take another rule. Not here:
values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from soupkit.adapter_folder import AdapterInfo, Module, ModuleInfo
from soupkit.checkpoint import Checkpoint, checkpoint_fingerprint, open_checkpoint
from soupkit.errors import CheckpointError, MergeError, PoolError, SoupkitError
from soupkit.pool_manifest import Manifest, PoolBase


def base_of(info: AdapterInfo) -> PoolBase:
    """The base that an adapter's config names.

    Raises:
        PoolError: it names none.
    """
    if not info.base:
        raise PoolError(
            f"{info.path}: its config has no base_model_name_or_path, so nothing tells whether it "
            "belongs to the pool: write the base's name into adapter_config.json"
        )
    return named_base(info.base, info.revision)


def named_base(name: str, revision: str | None) -> PoolBase:
    """A base as pools name it."""
    return PoolBase(name.rstrip("/") or name, revision)


def check_base(manifest: Manifest, info: AdapterInfo) -> PoolBase:
    """The base of an adapter that may come.

    Raises:
        PoolError: it is of another base or revision than the pool's.
    """
    base = base_of(info)
    check_same_base(manifest, base, str(info.path))
    return manifest.base or base


def check_same_base(manifest: Manifest, base: PoolBase, name: str) -> None:
    """Raise PoolError if an adapter of `base` is not of the pool's. `name`: of the adapter."""
    ours = manifest.base
    if ours is not None and base != ours and not _is_one_folder(base, ours):
        raise PoolError(
            f"{name} is an adapter of {_told(base)}, the pool of {_told(ours)}: give it a pool of "
            "its own"
        )


def is_of_base(base: PoolBase, opened: Checkpoint, *, name: str, fingerprint: str) -> bool | None:
    """Whether adapters of `base` are of a checkpoint that is here; None: nothing here tells.

    Args:
        name: that the checkpoint has beside its own. fingerprint: of its weights.
    """
    if base.name in (name, opened.source):
        return True
    folder = _base_folder(base)
    if folder is None:
        return None
    try:
        return folder.samefile(opened.path) or (
            checkpoint_fingerprint(open_checkpoint(folder)) == fingerprint
        )
    except (SoupkitError, OSError):
        return None


def _base_folder(base: PoolBase) -> Path | None:
    """The folder here with that base's weights: its name, or the copy of a hub's model."""
    if (folder := _folder(base.name)) is not None:
        return folder
    from huggingface_hub import try_to_load_from_cache  # which fetches nothing

    try:
        found = try_to_load_from_cache(base.name, "config.json", revision=base.revision)
    except (OSError, ValueError):  # no name that a hub has
        return None
    return Path(found).parent if isinstance(found, str) else None


def _is_one_folder(base: PoolBase, ours: PoolBase) -> bool:
    """Whether both name one folder here, one from where we are and the other from the root, say."""
    first, second = _folder(base.name), _folder(ours.name)
    if base.revision != ours.revision or first is None or second is None:
        return False
    return first.samefile(second)


def _folder(name: str) -> Path | None:
    """The folder here of that name; a name may be any text."""
    try:
        folder = Path(os.path.expanduser(name))
        return folder if folder.is_dir() else None
    except (OSError, ValueError):  # too long, a zero byte
        return None


def _told(base: PoolBase) -> str:
    return base.name if base.revision is None else f"{base.name} at {base.revision}"


def check_range(info: AdapterInfo, modules: Mapping[str, Module]) -> None:
    """Raise MergeError where an adapter's deltas are beyond float32, in which they are merged and
    served: one of huge lora_alpha would spoil a slot for all.
    """
    for name, module in modules.items():
        scaled = module.pair.b.float() * module.pair.scale
        if not (scaled.isfinite().all() and module.pair.a.float().isfinite().all()):
            raise MergeError(
                f"{info.path}: the delta of {name} is beyond the range of float32: correct its "
                "lora_alpha, or train it anew"
            )


def check_modules(info: AdapterInfo, held: Iterable[AdapterInfo]) -> None:
    """Check an adapter against those of the pool, by their headers.

    Raises:
        PoolError: a module has another kind, shape or number of experts there, or bare parameters
            are numbered otherwise.
    """
    counts = _experts(info)
    for other in held:
        theirs_of = _experts(other)
        for name in counts.keys() & theirs_of.keys():
            if counts[name] != theirs_of[name]:
                raise PoolError(
                    f"{info.path}: {name} has {counts[name]} experts, in the pool "
                    f"{theirs_of[name]} (0: it is adapted as a module): it is an adapter of "
                    "another base"
                )
        for name in info.modules.keys() & other.modules.keys():
            ours, theirs = info.modules[name], other.modules[name]
            if (ours.kind, ours.shape, ours.kernel) != (theirs.kind, theirs.shape, theirs.kernel):
                raise PoolError(
                    f"{info.path}: {name} is {ours.kind} {ours.shape}, in the pool {theirs.kind} "
                    f"{theirs.shape}: it is an adapter of another base"
                )
        names = [one.carried.get("target_parameters") for one in (info, other)]
        if all(names) and names[0] != names[1]:
            raise PoolError(
                f"{info.path} has target_parameters {names[0]}, the pool {names[1]}: PEFT numbers "
                "them, so only adapters with the same list can be merged"
            )


def _experts(info: AdapterInfo) -> dict[str, int]:
    """How many experts each bare parameter has, 0 for a module, by the name it is stored under."""
    found: dict[str, int] = {}
    for name, module in info.modules.items():
        is_expert = module.kind == "expert"
        stored = name.rpartition("[")[0] if is_expert else name
        found[stored] = found.get(stored, 0) + is_expert
    return found


def check_against_base(info: AdapterInfo) -> None:
    """Check the modules against the base's weights, where its name is a folder here.

    Raises:
        PoolError: the base has no such module, or its weight another shape.
    """
    folder = _base_folder(base_of(info))
    if folder is None or not (folder / "config.json").is_file():
        return
    try:
        base = open_checkpoint(folder)
    except CheckpointError:
        return  # Not needed for a pool, so its faults are not the adapter's.
    known = {*base.names, *base.tied}
    parts = {part for name in known for part in name.split(".")}
    for name, module in info.modules.items():
        if module.kind == "expert":
            continue
        if f"{name}.weight" in known:
            _check_shape(info, base, name, module)
        elif name.rpartition(".")[2] not in parts:
            raise PoolError(
                f"{info.path}: its module {name} is unknown: {folder} has no parameter of that "
                "name; is it an adapter of another base?"
            )


def _check_shape(info: AdapterInfo, base: Checkpoint, name: str, module: ModuleInfo) -> None:
    if not base.dtype(f"{name}.weight").is_floating_point:
        return  # Quantised, so packed.
    shape = base.shape(f"{name}.weight")
    flat = (shape[0], math.prod(shape[1:])) if shape else ()
    if module.shape not in (flat, flat[::-1]):
        raise PoolError(
            f"{info.path}: its {name} changes a weight {module.shape}, that of {base.path} has the "
            f"shape {tuple(shape)}: it is an adapter of another base"
        )


def with_rule(manifest: Manifest, changes: Mapping[str, Any]) -> Manifest:
    """With these fields of the rule changed; ValueError where what is there does not fit it."""
    rule = replace(manifest.rule, **changes)
    if len(manifest.slots) > (rule.slots or len(manifest.slots)):
        raise ValueError(
            f"slots={rule.slots}: the pool has {len(manifest.slots)}; remove tasks first"
        )
    if manifest.nbytes > rule.capacity_bytes:
        raise ValueError(
            f"capacity_bytes={rule.capacity_bytes}: the pool has {manifest.nbytes} bytes; remove "
            "tasks first"
        )
    if rule.merge != manifest.rule.merge and any(len(slot.history) > 1 for slot in manifest.slots):
        raise ValueError(
            f'merge="{rule.merge}": slots were merged by "{manifest.rule.merge}" already: make '
            "another pool for it"
        )
    return replace(manifest, rule=rule)
