"""Four ranks over gloo: weights on device meshes, whose replicas and boxes the store has to know.

python -m torch.distributed.run --standalone --nproc_per_node 4 tests/mesh_runs.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

from soupkit import SoupConfig
from soupkit.exits import leave
from soupkit.training import Soup
from soupkit.training.params import ParamStore

PLAN = {
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def model() -> LlamaForCausalLM:
    """Odd in what is not split by tensor parallelism, which needs even sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def meshed(kind: str) -> LlamaForCausalLM:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    found = model()
    if "tensor parallel" in kind:
        for layer in found.model.layers:
            parallelize_module(layer, mesh["other"], PLAN)
    if kind.startswith("FSDP2"):
        over = mesh["data"] if "tensor parallel" in kind else mesh
        for layer in found.model.layers:
            fully_shard(layer, mesh=over)
        if "root left whole" not in kind:
            fully_shard(found, mesh=over)
    assert any(isinstance(parameter.data, DTensor) for parameter in found.parameters())
    return found


def drawn(store: ParamStore) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(store.shape(name), generator=draw) for name in store.names}


def check(kind: str, folder: Path) -> dict:
    plain = ParamStore(model())
    live = meshed(kind)
    store = ParamStore(live)
    read = all(torch.equal(store.read(name), plain.read(name)) for name in plain.names)
    checksum = store.checksum() == plain.checksum()
    config = SoupConfig(merge_every_n_steps=1, rank=3, gate="none", feed_back=True)
    soup = Soup(live, config=config, output_dir=folder / kind)
    reference = drawn(plain)
    soup.step()
    for name, value in reference.items():
        store.write(name, value)
    written = all(torch.equal(store.read(name), value) for name, value in reference.items())
    soup.step()
    base = {name: plain.read(name) for name in plain.names}
    merged = True
    for name, value in reference.items():
        # The partner is the base itself, so half of the truncated delta is left.
        delta = (value - base[name]).double()
        if delta.dim() == 2:
            u, s, v = torch.linalg.svd(delta, full_matrices=False)
            delta = (u[:, :3] * s[:3]) @ v[:3]
        expected = base[name].double() + delta / 2
        merged &= torch.allclose(store.read(name).double(), expected, rtol=1e-4, atol=1e-5)
    return {"read": read, "checksum": checksum, "written": written, "merged": bool(merged)}


def main() -> None:
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 4
    folder = Path(sys.argv[1])
    kinds = ("FSDP2 hybrid", "FSDP2 and tensor parallel", "tensor parallel, twice",
             "FSDP2, root left whole")  # fmt: skip
    mine = {kind: check(kind, folder) for kind in kinds}
    every = [None] * 4
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
