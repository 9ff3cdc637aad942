"""Two ranks whose LoRA adapter goes into a pool; launched by test_training_pool.py.

    python -m torch.distributed.run --standalone --nproc_per_node 2 \
        tests/pool_runs.py FOLDER BASE KIND

KIND: DDP, or a strategy of sharded_frameworks.py. Each part asserts the strategy that it means.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_runs import gathered
from peft import LoraConfig, get_peft_model
from soup_runs import load, make_trainer
from torch.nn.parallel import DistributedDataParallel

from soupkit.exits import leave
from soupkit.kmerge import PoolRule
from soupkit.training import KMergeCallback
from soupkit.training.params import ParamStore

RULE = PoolRule(capacity_bytes=10**6)


def adapted(base: Path):
    torch.manual_seed(1)
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    return get_peft_model(load(base), lora)


def trained(kind: str, base: Path, folder: Path, callback: KMergeCallback):
    settings = {"learning_rate": 3e-2, "max_steps": 3}
    if kind == "DDP":
        run = make_trainer(base, folder, [callback], model=adapted(base), **settings)
        run.train()
        assert type(run.model_wrapped) is DistributedDataParallel
        return run
    from sharded_frameworks import sharded_trainer, strategy_of, without_compiler

    if "ZeRO" in kind:
        without_compiler()

    sharded = {**settings, "model": adapted(base), "save_strategy": "no"}
    run = sharded_trainer(kind, base, folder, [callback], **sharded)
    run.train()
    strategy_of(kind, run)
    return run


def factors(run) -> dict[str, torch.Tensor]:
    """Whole, by the names that PEFT's file has."""
    store = ParamStore(run.model_wrapped)
    return {name.replace(".default", ""): store.tensor(name) for name in store.names}


def main() -> None:
    folder, base, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    pool = folder / "pool"
    callback = KMergeCallback(pool=pool, task="first", rule=RULE)
    run = trained(kind, base, folder / "run", callback)
    found = factors(run)
    refused = None
    if kind == "DDP":
        full = KMergeCallback(pool=folder / "small", task="big", rule=PoolRule(capacity_bytes=100))
        trained(kind, base, folder / "run", full)
        refused = gathered([full.report is None, str(full.kept)])
    results = {
        "reports": gathered([callback.report.slot, callback.report.action]),
        "kept": gathered(callback.kept),
        "refused": refused,
    }
    results["kept"] = [kept is None for kept in results["kept"]]
    if dist.get_rank() == 0:
        torch.save(found, folder / "factors.pt")
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
