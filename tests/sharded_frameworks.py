"""Accelerate, Trainer and a loop of one's own over DeepSpeed and FSDP2, interrupted and resumed, on
two ranks over gloo; launched by test_training_sharded.py.

    python -m torch.distributed.run --standalone --nproc_per_node 2 \
        tests/sharded_frameworks.py FOLDER BASE PART...

Neither framework supports this on a CPU by itself: unless told otherwise both train something else
in silence (one model a rank, or plain DDP). So each part asserts the strategy that it means.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import (
    Accelerator,
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, set_seed
from ddp_runs import StopAt, gathered
from sharded_loops import (
    accumulating_part,
    foreign_part,
    one_part,
    own_part,
    skipping_part,
)
from sharded_runs import same_bits
from sharded_strategies import CUT, DeepSpeed, Fsdp2, adapted, without_compiler
from soup_runs import load, make_trainer, rows
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.integrations import deepspeed as hf_deepspeed

from soupkit import ExportConfig, SoupConfig
from soupkit.bundle import open_variant
from soupkit.exits import leave
from soupkit.training import Soup, SoupCallback

CONFIG = SoupConfig(merge_every_n_steps=2, rank=3, feed_back=True)
LAYER = "LlamaDecoderLayer"


def fresh_state(kind: str) -> None:
    """As in a new process; then what makes accelerate shard on a CPU."""
    hf_deepspeed.unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_TORCH_DEVICE"):
        os.environ.pop(name, None)
    if kind == "FSDP2":
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        # Accelerate shards for the types of accelerators only.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def zero_config(kind: str, *, bf16: bool = False) -> dict:
    stage = int(kind.removeprefix("ZeRO-"))
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **(CUT if stage == 3 else {})},
    }
    if bf16:
        config["bf16"] = {"enabled": True}
    return config


def make_accelerator(kind: str, folder: Path) -> Accelerator:
    fresh_state(kind)
    project = ProjectConfiguration(
        project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2
    )
    if kind == "FSDP2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[LAYER],
            state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=False,
        )
        return Accelerator(
            fsdp_plugin=plugin, gradient_accumulation_steps=2, project_config=project
        )
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(
            hf_ds_config={
                **zero_config(kind),
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 1.0,
            }
        ),
        # Else every rank believes that it is the only one.
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        project_config=project,
    )


class Loop:
    """An Accelerate loop with accumulation 2, dropout, shuffled data; every merge is accepted."""

    def __init__(self, kind: str, base: Path, folder: Path) -> None:
        self.accelerator = accelerator = make_accelerator(kind, folder)
        assert accelerator.num_processes == 2
        set_seed(5)
        inner = load(base)
        data = [torch.tensor(row["input_ids"]) for row in rows(28, seed=1)]
        generator = torch.Generator().manual_seed(7)
        self.model, self.optimizer, self.loader = accelerator.prepare(
            inner,
            torch.optim.AdamW(inner.parameters(), lr=1e-2),
            DataLoader(data, batch_size=1, shuffle=True, generator=generator),
        )
        self.held_out = torch.tensor([row["input_ids"] for row in rows(2, seed=2)])
        if kind == "FSDP2":
            self.strategy = Fsdp2.around(self.model, self.optimizer)
        else:
            assert accelerator.distributed_type == DistributedType.DEEPSPEED
            self.strategy = DeepSpeed.around(self.model, **(CUT if kind == "ZeRO-3" else {}))
            assert kind == f"ZeRO-{self.strategy.stage}"
        self.strategy.assert_in_force()
        self.seen: list[list[int]] = []
        self.calls: list[int] = []
        self.soup = Soup(
            self.model,
            optimizer=self.optimizer,
            config=CONFIG,
            accelerator=accelerator,
            evaluate=self.score,
        )

    def score(self) -> float:
        """Falls with every call, and does not depend on what was called before a resume."""
        self.model(input_ids=self.held_out, labels=self.held_out)
        self.calls.append(self.soup.num_steps)
        return -float(10 * self.calls[-1] + self.calls.count(self.calls[-1]))

    def train(self, stop: int, *, start: int = 0, save_at: tuple[int, ...] = ()) -> None:
        """Optimizer steps start + 1 .. stop of one epoch."""
        step = 0
        self.model.train()
        for batch in self.loader:
            skip = step < start
            with self.accelerator.accumulate(self.model):
                if not skip:
                    self.seen.append(batch[0].tolist())
                    self.accelerator.backward(self.model(input_ids=batch, labels=batch).loss)
                    self.optimizer.step()
                    self.soup.step()
                    self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                step += 1
                if step in save_at and not skip:
                    self.accelerator.save_state()
                if step == stop:
                    return


def accelerate_part(kind: str, base: Path, folder: Path) -> dict:
    whole = Loop(kind, base, folder / "whole")
    whole.train(7)
    expected = whole.strategy.whole()
    Loop(kind, base, folder / "run").train(6, save_at=(3, 5))
    second = Loop(kind, base, folder / "run")
    second.accelerator.load_state(str(folder / "run" / "checkpoints" / "checkpoint_0"))
    second.train(7, start=3)
    found = second.strategy.whole()
    second.soup.finish(export=ExportConfig(family=folder / "family", name="two"))
    return {
        "different_data": gathered(whole.seen)[0] != gathered(whole.seen)[1],
        "equal": all(same_bits(found, other) for other in gathered(found)),
        "resumed": gathered(same_bits(expected, found)),
        "merges": [report.step for report in second.soup.reports if report.accepted],
    }


class Watching(Trainer):
    """Notes what data this rank sees; its score falls with every batch, so that merges stay."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), inputs["input_ids"].tolist()]
        return super().training_step(model, inputs, *args, **kwargs)

    def prediction_step(self, *args, **kwargs):
        loss, *rest = super().prediction_step(*args, **kwargs)
        self.scored = [*getattr(self, "scored", []), self.state.global_step]
        step = self.scored[-1]
        # Does not depend on what was scored before a resume.
        return (loss * 0 - 1000.0 * step - self.scored.count(step), *rest)


def sharded_trainer(kind: str, base: Path, folder: Path, callbacks: list, **changes) -> Trainer:
    """A kind that ends with " init" loads the model partitioned, as a user's script does that
    makes its TrainingArguments first; with " lora", an adapter is trained.
    """
    fresh_state(kind)
    settings: dict = {
        "trainer_class": Watching,
        "save_strategy": "steps",
        "save_steps": 1,
        "accelerator_config": {"use_configured_state": True},
    }
    if kind == "FSDP2":
        fsdp = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [LAYER],
            "reshard_after_forward": True,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        settings |= {"use_cpu": False, "fsdp": True, "fsdp_config": fsdp}
    else:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        # TrainingArguments has no argument for the backend.
        PartialState(backend="gloo")
        config = zero_config(kind.split()[0], bf16=True)
        settings |= {"deepspeed": config, "bf16": True}
        if kind.endswith(" init"):
            config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
            config |= {"gradient_clipping": 1.0}
            # Alive while the model is loaded, which is how transformers knows.
            alive = hf_deepspeed.HfDeepSpeedConfig(config)
            settings["model"] = load(base)
            assert all(hasattr(p, "ds_id") for p in settings["model"].parameters()), alive
        if kind.endswith(" lora"):
            torch.manual_seed(1)
            settings["model"] = adapted(load(base))
    return make_trainer(base, folder, callbacks, **{**settings, **changes})


def strategy_of(kind: str, trainer: Trainer):
    assert trainer.args.world_size == 2
    if kind == "FSDP2":
        strategy = Fsdp2.around(trainer.model, trainer.optimizer)
    else:
        strategy = DeepSpeed.around(trainer.model_wrapped, **CUT)
    strategy.assert_in_force()
    return strategy


def trainer_part(kind: str, base: Path, folder: Path) -> dict:
    export = ExportConfig(family=folder / "family", name="two")
    whole = sharded_trainer(kind, base, folder / "whole", [SoupCallback(CONFIG, export=export)])
    whole.train()
    expected = strategy_of(kind, whole).whole()
    sharded_trainer(kind, base, folder / "run", [SoupCallback(CONFIG), StopAt(5)]).train()
    if kind == "FSDP2":
        # Shards only: there is no file of weights to be read.
        assert not list((folder / "run" / "checkpoint-3").rglob("*.safetensors"))
    again = SoupCallback(CONFIG)
    resumed = sharded_trainer(kind, base, folder / "run", [again])
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    found = strategy_of(kind, resumed).whole()
    return {
        "different_data": gathered(whole.seen)[0] != gathered(whole.seen)[1],
        "equal": all(same_bits(found, other) for other in gathered(found)),
        "resumed": gathered(same_bits(expected, found)),
        "merges": [report.step for report in again.reports if report.accepted],
    }


class Keep(TrainerCallback):
    """The weights after step 1 and after the last one, as the framework gathers them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.trainer: Trainer | None = None
        self.kept: dict[int, dict] = {}

    def on_step_end(self, args, state, control, **kwargs):
        self.kept[state.global_step] = strategy_of(self.kind, self.trainer).whole()


def best_part(kind: str, base: Path, folder: Path) -> dict:
    """The score that is greatest is the first one, so that step is loaded at the end."""
    export = ExportConfig(family=folder / "family", name="best")
    config = SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True)
    keep = Keep(kind)
    keep.trainer = trainer = sharded_trainer(
        kind,
        base,
        folder / "run",
        [SoupCallback(config, export=export), keep],
        eval_strategy="steps",
        eval_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        max_steps=4,
    )
    trainer.train()
    found, name = strategy_of(kind, trainer).whole(), "model.norm.weight"
    assert not same_bits(keep.kept[1], keep.kept[4])
    variant = open_variant(folder / "family" / "variants" / "best").load()
    return {
        "best": trainer.state.best_global_step,
        "is_loaded": same_bits(found, keep.kept[1]),
        "is_exported": torch.equal(variant.raw[name].float(), found[name].float()),
    }


PARTS = {
    "accelerate": accelerate_part,
    "trainer": trainer_part,
    "own": own_part,
    "accumulating": accumulating_part,
    "best": best_part,
    "one": one_part,
    "foreign": foreign_part,
    "skipping": skipping_part,
}


def main() -> None:
    folder, base, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo")
    results: dict = {}
    for name in names:
        part, kind = name.split("/")
        if "ZeRO" in kind:
            try:
                without_compiler()
            except ImportError as error:
                results[name] = {"skipped": str(error)}
                continue
        results[name] = PARTS[part](kind, base, folder / name)
        gc.collect()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
