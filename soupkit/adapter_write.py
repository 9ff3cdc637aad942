"""Writing a PEFT LoRA adapter folder from factored deltas.

    lora_alpha = scale * r, or the scale folded into b and lora_alpha = r

The folder is PEFT's own: ranks that differ stand in rank_pattern and alpha_pattern under anchored
names. Not here: reading (adapter_folder.py), and what the factors are of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from soupkit.adapter_config import CARRIED, CONFIG_NAME, WEIGHTS_NAME, plain_config
from soupkit.adapter_layout import Module, is_module_name, owner_of, stored_names
from soupkit.factored import Pair
from soupkit.files import atomic_folder, atomic_write_json
from soupkit.lora_kinds import expert_factors, factors_of
from soupkit.numeric import check_finite, rounded
from soupkit.shards import SpooledFile

_EXPERT = re.compile(r"(.+)\[(0|[1-9][0-9]*)\]")


def write_adapter(
    out: str | Path,
    modules: Mapping[str, Module],
    *,
    base: str | None,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    carried: Mapping[str, Any] | None = None,
) -> Path:
    """Write the new PEFT adapter folder `out`, which appears whole or not at all.

    One scale that all modules share is kept if lora_alpha can say it in whole numbers; else each is
    folded into its b, so that PEFT's scaling is 1 also in readers that know no alpha_pattern.

    Args:
        modules: at least one; of a bare parameter all experts, whose ranks are filled up with zeros
            to the largest.
        base, revision: of the base model, for the config.
        dtype: of the factors; None: each one's own.
        carried: fields of the config to take over, as AdapterInfo.carried has them: "task_type",
            "fan_in_fan_out", "target_parameters" (needed with experts), "auto_mapping".
    Returns:
        `out`.
    Raises:
        ValueError: no modules, a name that cannot be read back, experts missing, another field.
        MergeError: an entry is not finite, or beyond the range of the dtype.
        FileExistsError, OSError: `out` has content, or the disk refused.
    """
    stacks = _stacks(modules)
    fields = _checked_fields(carried or {}, any(name.endswith("]") for name in modules))
    ranks: dict[str, int] = {}
    for name, stack in stacks.items():
        key = f"{owner_of(name)}[]" if stack[0].kind == "expert" else name
        ranks[key] = max(ranks.get(key, 0), *(module.pair.rank for module in stack))
    scale = _common_scale(modules.values(), ranks.values())
    with atomic_folder(Path(out)) as folder:
        file = SpooledFile(folder / WEIGHTS_NAME)
        try:
            for name, stack in stacks.items():
                rank = ranks.get(name) or ranks[f"{owner_of(name)}[]"]
                for stored, factor in _stored(name, stack, scale, rank):
                    file.add(stored, rounded(stored, factor, dtype or factor.dtype))
            file.finish(metadata={"format": "pt"})
        finally:
            file.close()
        config = plain_config(
            base=base, revision=revision, ranks=ranks, scale=scale or 1.0, carried=fields
        )
        atomic_write_json(folder / CONFIG_NAME, config)
    return Path(out)


def _stacks(modules: Mapping[str, Module]) -> dict[str, list[Module]]:
    """The modules by stored name, experts of one parameter together in their order."""
    if not modules:
        raise ValueError("no modules: an empty adapter cannot be written; give at least one")
    numbered: dict[str, dict[int, Module]] = {}
    for name, module in modules.items():
        match = _EXPERT.fullmatch(name)
        if (match is not None) != (module.kind == "expert"):
            raise ValueError(f"{name!r}: names of experts, and no other, end in a number: 'up[3]'")
        stored, number = (match[1], int(match[2])) if match else (name, 0)
        if not is_module_name(stored):
            raise ValueError(f"{name!r} is no name of a module: use the base model's own")
        experts = numbered.setdefault(stored, {})
        if number in experts:
            raise ValueError(f"{stored!r} is given both as a module and as experts")
        experts[number] = module
    for stored, found in numbered.items():
        shapes = {module.pair.shape for module in found.values()}
        if len(shapes) > 1 or sorted(found) != list(range(len(found))):
            raise ValueError(
                f"{stored}: experts {sorted(found)} of shapes {sorted(shapes)}: give every expert "
                "from 0 on, all of one shape"
            )
    return {stored: [found[i] for i in sorted(found)] for stored, found in numbered.items()}


def _checked_fields(carried: Mapping[str, Any], has_experts: bool) -> dict[str, Any]:
    """The fields to take over."""
    odd = sorted(carried.keys() - set(CARRIED))
    if odd:
        raise ValueError(f"carried={odd}: only {', '.join(CARRIED)} can be taken over")
    if has_experts and not carried.get("target_parameters"):
        raise ValueError(
            'experts need carried={"target_parameters": [...]}, as the adapters read have it'
        )
    return {key: carried[key] for key in carried if has_experts or key != "target_parameters"}


def _common_scale(modules: Iterable[Module], ranks: Iterable[int]) -> float | None:
    """The scale of all modules, if whole lora_alphas give it exactly."""
    scales = {module.pair.scale for module in modules}
    scale = scales.pop()
    if scales or any((alpha := round(scale * rank)) < 1 or alpha / rank != scale for rank in ranks):
        return None
    return scale


def _stored(
    name: str, stack: Sequence[Module], scale: float | None, rank: int
) -> Iterator[tuple[str, Tensor]]:
    """The two tensors of one module or of its experts; scales are folded in if `scale` is None."""
    pairs = []
    for module in stack:
        pair = module.pair
        check_finite(f"{name}.a", pair.a)
        check_finite(f"{name}.b", pair.b)
        b = pair.b
        if scale is None:
            wide = torch.promote_types(b.dtype, torch.float32)
            b = rounded(name, b.to(wide) * pair.scale, b.dtype)
        extra = rank - pair.rank
        pairs.append(
            Pair(functional.pad(pair.a, (0, 0, 0, extra)), functional.pad(b, (0, extra)), 1.0)
        )
    kind = stack[0].kind
    if kind == "expert":
        a, b = expert_factors(pairs)
    else:
        a, b = factors_of(kind, pairs[0], kernel=stack[0].kernel)
    yield from zip(stored_names(kind, name), (a, b), strict=True)
