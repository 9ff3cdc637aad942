"""Starts a recipe as its own file would be started, and leaves what this process trained and how.

    accelerate launch ... tests/recipe_witness.py FOLDER recipes/sft.py --base base ...

FOLDER/rank-N.json: strategy by the frameworks' own types, not by what soupkit says of it; parts;
the first tokens that were trained on. Where FOLDER/break lies, the family's path is made a file
before the end, so that the export fails when everything is trained.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from soupkit.training.soup import SoupRun

FOLDER, RECIPE = Path(sys.argv[1]), Path(sys.argv[2])
RANK = int(os.environ.get("RANK", "0"))
seen: list[list[list[int]]] = []


def strategy_of(model: nn.Module) -> str:
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if "DeepSpeedEngine" in kinds:
        place = getattr(model.zero_offload_param(), "device", "none")
        offload = " offload" if place == "cpu" else ""
        return f"ZeRO-{model.zero_optimization_stage()}{offload}"
    if "FSDPModule" in kinds:
        return "FSDP2"
    return "DDP" if isinstance(model, DistributedDataParallel) else "plain"


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether this process holds a part only, between two steps."""
    if hasattr(parameter, "ds_id"):
        return parameter.numel() == 0 and parameter.ds_tensor.numel() > 0
    if hasattr(parameter, "to_local"):
        return parameter.to_local().numel() < parameter.numel()
    return False


def record(model: nn.Module) -> dict:
    trained = [p for p in model.parameters() if p.requires_grad]
    return {
        "strategy": strategy_of(model),
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": dist.get_backend() if dist.is_initialized() else "",
        "cut": sum(map(is_cut, trained)) / len(trained),
        "masters": sum(hasattr(p, "_hp_mapping") for p in trained) / len(trained),
        "adapters": any("lora_A" in name for name, _ in model.named_parameters()),
        "seen": seen[0],
    }


def note_tokens(module: nn.Module, inputs: tuple) -> None:
    if isinstance(module, nn.Embedding) and module.training and not seen:
        seen.append(inputs[0].tolist())


def watch() -> None:
    original = SoupRun.at_step

    def at_step(self, step, *args, **kwargs):
        report = original(self, step, *args, **kwargs)
        found = FOLDER / f"rank-{RANK}.json"
        if not found.exists():
            found.write_text(json.dumps(record(self.store.model)))
        if RANK == 0 and (FOLDER / "break").exists():
            (FOLDER / "break").rename(sys.argv[sys.argv.index("--family") + 1])
        return report

    SoupRun.at_step = at_step


register_module_forward_pre_hook(note_tokens)
watch()
sys.argv = [str(RECIPE), *sys.argv[3:]]
sys.path[0] = str(RECIPE.parent)
runpy.run_path(str(RECIPE), run_name="__main__")
