"""The plan of a node: every layout of its GPUs, the one to take, its times, the document's figures.

Nothing is computed here; node.py, node_times.py and design_figures.py do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from soupkit.design_figures import Claim, claims
from soupkit.node import GpuPlan, Wish, advised, kv_copies, layouts, plan_gpu
from soupkit.node_times import Speeds, Times, times
from soupkit.placement import ModelShape


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What `plan_node` found. best, times: None, and claims empty, if the base fits nowhere."""

    shape: ModelShape
    wish: Wish
    speeds: Speeds
    prompt: int
    plans: tuple[GpuPlan, ...]
    best: GpuPlan | None
    times: Times | None
    claims: tuple[Claim, ...]

    @property
    def needs(self) -> str:
        """What the layout that is advised asks of an engine."""
        if self.best is None:
            return ""
        layout, shape = self.best.layout, self.shape
        if layout.tensor == layout.pipeline == 1:
            return "an engine on each GPU"
        found = [f"{layout.tensor * layout.pipeline} GPUs in step behind each engine"]
        if layout.tensor > 1:
            copies = kv_copies(shape, layout)
            heads = f"{max(1, shape.kv_heads // layout.tensor)} of {shape.kv_heads}"
            found.append(
                f"TP {layout.tensor}: {heads} key-value heads on each"
                + (f", each head on {copies}" if copies > 1 else "")
                + "; two sums over all ranks a layer and step"
            )
        if layout.pipeline > 1:
            found.append(
                f"PP {layout.pipeline}: {shape.layers // layout.pipeline} layers a stage; more "
                "throughput, no shorter first token; not in transformers' engine"
            )
        return "; ".join(found)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        best = None
        if self.best is not None and self.times is not None:
            figures = [figure.to_json() for figure in self.times.figures]
            best = self.best.to_json() | {"needs": self.needs, "times": figures}
        return {
            "shape": self.shape.name,
            "parameters": self.shape.parameters,
            "wish": asdict(self.wish),
            "speeds": asdict(self.speeds),
            "prompt": self.prompt,
            "layouts": [plan.to_json() for plan in self.plans],
            "advised": best,
            "document": [claim.to_json() for claim in self.claims],
        }


def plan_node(
    shape: ModelShape,
    wish: Wish,
    *,
    gpus: int,
    gpu_bytes: int,
    speeds: Speeds,
    prompt: int,
    parameters: float,
) -> NodePlan:
    """Plans every layout of `gpus` equal GPUs.

    Args:
        prompt: tokens before the first one that is generated. parameters: as people round them, for
            the document's rules.
    Raises:
        ValueError: a count that is none.
    """
    plans = tuple(plan_gpu(shape, one, wish, gpu_bytes=gpu_bytes) for one in layouts(gpus))
    best = advised(list(plans))
    if best is None:
        return NodePlan(shape, wish, speeds, prompt, plans, None, None, ())
    found = times(shape, best, speeds, prompt=prompt)
    said = claims(shape, best, found, parameters=parameters, prompt=prompt)
    return NodePlan(shape, wish, speeds, prompt, plans, best, found, tuple(said))
