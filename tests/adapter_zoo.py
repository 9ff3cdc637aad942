"""A model with every kind of layer that LoRA can adapt, its PEFT adapters, and what PEFT says that
they add; tests of adapter folders and of the pool share it.
"""

import re
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class Experts(nn.Module):
    """A mixture's experts as bare parameters; `is_transposed` as PEFT reads it."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        wide, narrow = ((5, 7), (7, 5)) if is_transposed else ((7, 5), (5, 7))
        self.up = nn.Parameter(0.3 * torch.randn(3, *wide))
        self.down = nn.Parameter(0.3 * torch.randn(3, *narrow))

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for up, down in zip(self.up, self.down, strict=True):
            up, down = (up, down) if self.is_transposed else (up.T, down.T)
            total = total + (x @ up).tanh() @ down
        return total


class Zoo(nn.Module):
    """Odd sizes; tokens [batch, 6] below 11 in, a row of numbers a sample out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.table = nn.Embedding(11, 6)
            self.fused = Conv1D(10, 6)
            self.blocks = nn.ModuleList(nn.ModuleDict({"line": nn.Linear(6, 6)}) for _ in range(2))
            self.line = nn.Linear(6, 5)
            self.one = nn.Conv1d(6, 4, 3)
            self.two = nn.Conv2d(3, 5, (3, 2))
            self.point = nn.Conv2d(3, 5, 1)
            self.three = nn.Conv3d(1, 3, 2)
            self.experts = Experts()
            self.turned = Experts(is_transposed=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block["line"](x).tanh()
        planes = x.unsqueeze(1).expand(-1, 3, -1, -1)
        narrow = self.line(x)
        parts = [self.fused(x), narrow, self.one(x), self.two(planes), self.point(planes)]
        parts += [self.three(planes.unsqueeze(1)), self.experts(narrow), self.turned(narrow)]
        return torch.cat([part.flatten(1) for part in parts], dim=1)


LINEAR = ("blocks.0.line", "blocks.1.line", "line")
MODULES = ("table", "fused", *LINEAR, "one", "two", "point", "three")
PARAMETERS = ("experts.up", "experts.down", "turned.up", "turned.down")
TOKENS = torch.arange(12).remainder(11).reshape(2, 6)


def adapted(
    *, seed: int = 0, modules=MODULES, parameters=(), model: nn.Module | None = None, **opt
):
    """A Zoo in PEFT with random factors. Names are whole: "line" is not "blocks.0.line"."""
    config = LoraConfig(
        target_modules="|".join(map(re.escape, modules)) or [],
        target_parameters=list(parameters) or None,
        **{"r": 3, "lora_alpha": 6, **opt},
    )
    model = get_peft_model(Zoo() if model is None else model, config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def saved(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def deltas_of(model: nn.Module, adapter: str = "default") -> dict[str, Tensor]:
    """PEFT's own deltas by our names, in our orientation."""
    found = {}
    for own, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        name = own.removeprefix("base_model.model.")
        delta = layer.get_delta_weight(adapter).detach()
        if type(layer).__name__ == "ParamWrapper":
            for expert, one in enumerate(delta if delta.ndim == 3 else delta[None]):
                found[f"{name}[{expert}]"] = one.T if "turned" in name else one
        elif isinstance(layer.get_base_layer(), Conv1D):
            found[name] = delta.T
        else:
            found[name] = delta.reshape(delta.shape[0], -1)
    return found
