"""What the authors' OPCM code makes of small models; its results lie in opcm_reference.json.

    python -m venv venv && venv/bin/pip install fusion-bench==0.2.33 "transformers==4.56.2" \
        "datasets<4.2" "huggingface_hub<1" && venv/bin/python tests/opcm_reference.py

Runs fusion_bench's serial OPCMForCLIP.run itself (MIT licence), on a model that is no CLIP: its
methods look at modules only. The test that reads the results needs none of it.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

RESULTS = Path(__file__).with_suffix(".json")
TASKS = 4
# Not 1: whether the last share of a sum exceeds 1 is up to its rounding there.
ALPHAS = (0.2, 0.5, 0.8)


class Small(nn.Module):
    """One of each: a table, linears wider and taller than they are long, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 7)
        self.up = nn.Linear(7, 11)
        self.norm = nn.LayerNorm(11)
        self.down = nn.Linear(11, 7, bias=False)


def model(task: int) -> Small:
    """Weights by a formula, the same on every machine; task 0 is the base."""
    found = Small().double()
    with torch.no_grad():
        for i, parameter in enumerate(found.parameters()):
            at = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
            parameter.copy_(torch.sin(3.0 * at + i))
            if task:
                parameter.add_(0.1 * torch.sin(1.3 * at * task + 2.0 * at.square() + i + task))
    return found


def merged(alpha: float) -> dict[str, list[float]]:
    """The weights that fusion_bench ends with, flat."""
    from fusion_bench.method.opcm.opcm import OPCMForCLIP

    class Run(OPCMForCLIP):
        log_dir = None
        fabric = SimpleNamespace(device="cpu", log=lambda *_, **__: None)
        _program = SimpleNamespace(taskpool=SimpleNamespace(_test_datasets={}))

        def __init__(self) -> None:
            self.alpha, self.shuffle_order, self.seed = alpha, False, None
            self.save_on_every_step = self.evaluate_on_every_step = False

        def profile(self, *_: object) -> object:
            return nullcontext()

        def print_profile_summary(self) -> None:
            pass

    pool = SimpleNamespace(
        model_names=[str(task) for task in range(1, TASKS + 1)],
        load_pretrained_model=lambda: model(0),
        load_model=lambda name: model(int(name)),
    )
    return {
        name: parameter.flatten().tolist() for name, parameter in Run().run(pool).named_parameters()
    }


if __name__ == "__main__":
    RESULTS.write_text(json.dumps({str(alpha): merged(alpha) for alpha in ALPHAS}) + "\n")
