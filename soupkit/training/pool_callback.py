"""KMergeCallback: the LoRA adapter that a Trainer run ends with goes into a pool (pool.py).

What goes in are the weights that the run ends with: the live ones, or what a SoupCallback beside it
ends with. With one it acts before that callback's export, in whatever order the two are listed.
Factors are gathered one at a time and written by rank 0 as a PEFT folder beside the pool, or in the
run's output_dir where the disk refuses that. It is removed once the pool has it and stays where the
pool refuses it: a run that has trained does not fail for that. Not here: which slot (kmerge.py).
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from soupkit.adapter_config import CARRIED, refuse_more
from soupkit.adapter_folder import Module, write_adapter
from soupkit.config import check_variant_name
from soupkit.delta import TensorSource, canonical_name
from soupkit.errors import PoolError, TrainingError
from soupkit.kmerge import PoolRule
from soupkit.lora_kinds import pair_of
from soupkit.pool import AdapterPool, PoolReport
from soupkit.pool_admission import check_same_base, named_base, with_rule
from soupkit.pool_manifest import POOL_NAME, Manifest
from soupkit.pool_place import Quality
from soupkit.tracking import say
from soupkit.training.checkpoint_tensors import checkpoint_model, own_tensors
from soupkit.training.final import Final
from soupkit.training.peft import LoraUnit, is_peft, lora_units, plain_parameters
from soupkit.training.ranks import Ranks
from soupkit.training.refusals import refuse_unsupported
from soupkit.training.served import on_zero_reading
from soupkit.training.trainer import SoupCallback, find_trainer, is_preempted
from soupkit.training.weights import unwrap


class KMergeCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Adds the adapter of a run with PEFT to a pool when training ends."""

    def __init__(
        self,
        *,
        pool: str | Path,
        task: str,
        rule: PoolRule | None = None,
        quality: Quality | None = None,
    ) -> None:
        """Nothing happens before training begins.

        Args:
            pool: its folder; made at the end if absent, which needs a rule.
            task: that the adapter will serve.
            rule: the pool's from then on; None: the one it has.
            quality: as for AdapterPool.add; runs on rank 0 alone while the others wait.
        Raises:
            ValueError: task is no name.
        """
        check_variant_name(task, "task")
        self.pool = Path(os.path.expanduser(pool)).absolute()
        self.task = task
        self.rule = rule
        self.quality = quality
        self.report: PoolReport | None = None
        self.kept: Path | None = None
        self._attached: Trainer | None = None
        self._model: Any = None
        self._output: Path | None = None
        self._is_preempted = False
        self._has_soup = False

    def attach(self, trainer: Trainer) -> KMergeCallback:
        """Name the Trainer, where it cannot be found by itself. Returns the callback."""
        self._attached = trainer
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check everything. Collective.

        Raises:
            TrainingError, PoolError, ValueError: the run's adapter could not go into the pool.
        """
        trainer = self._attached or find_trainer(self)
        ranks, model = Ranks.current(), trainer.model_wrapped
        fields = ranks.on_each(lambda: _checked_fields(model))
        ranks.on_zero(lambda: self._check_pool(fields))
        self.report = self.kept = None
        self._model, self._is_preempted, self._has_soup = model, False, False
        self._output = Path(args.output_dir).absolute()
        for other in trainer.callback_handler.callbacks:
            if isinstance(other, SoupCallback):
                self._has_soup = True
                if self._add not in other.at_end:
                    other.at_end.append(self._add)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the run only stops to be resumed."""
        self._is_preempted = self._is_preempted or is_preempted(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the adapter, unless a SoupCallback has it done. Collective."""
        if not self._has_soup and not self._is_preempted:
            self._add(Final())

    def _check_pool(self, fields: Mapping[str, Any]) -> None:
        """Raise what is known to speak against the adapter already. On one rank."""
        is_new = not (self.pool / POOL_NAME).exists()
        if is_new and self.rule is None:
            raise PoolError(
                f"{self.pool} is no pool yet: give rule=PoolRule(capacity_bytes=...) to make one"
            )
        parent = next(p for p in (self.pool, *self.pool.parents) if p.exists())
        is_taken = is_new and parent == self.pool and (not parent.is_dir() or any(parent.iterdir()))
        if is_taken or not os.access(parent, os.W_OK | os.X_OK):
            raise PoolError(f"pool={str(self.pool)!r}: no pool can be made there; choose another")
        if is_new:
            assert self.rule is not None
            manifest = Manifest(self.rule)
        else:
            manifest = AdapterPool(self.pool).read()
            if self.rule is not None:
                manifest = with_rule(manifest, self.rule.to_json())
        if self.task in manifest.tasks:
            raise PoolError(
                f"{self.pool} has the task {self.task!r} already: remove it first, or name another"
            )
        if (self.quality is None) != (manifest.rule.gate_quality is None):
            raise ValueError(
                f"gate_quality={manifest.rule.gate_quality} with quality={self.quality}: the gate "
                "needs a function that scores, and such a function the gate"
            )
        base = named_base(fields["base"], fields["revision"])
        check_same_base(manifest, base, f"task {self.task!r}")

    def _add(self, final: Final) -> None:
        """Add the adapter that the run ends with. Collective."""
        model, self._model = self._model, None
        if model is None:  # Taken out of the Trainer since.
            return
        units, fields = lora_units(model), _checked_fields(model)
        source = own_tensors(model, instead=final.instead)
        self.report, self.kept = on_zero_reading(
            Ranks.current(), source, lambda tensors: self._write(tensors, units, fields)
        )

    def _write(
        self, tensors: TensorSource, units: tuple[LoraUnit, ...], fields: Mapping[str, Any]
    ) -> tuple[PoolReport | None, Path | None]:
        """(what became of the adapter, where it is kept if not in the pool). On rank 0."""
        kept: Path | None = None
        try:
            modules = dict(_module(unit, tensors) for unit in units)
            kept = self._keep(modules, fields)
            rule = {} if self.rule is None else self.rule.to_json()
            report = AdapterPool.add_to(
                self.pool, kept, rule=rule, task=self.task, quality=self.quality
            )
        except Exception as error:  # noqa: BLE001 - also what the caller's quality raises
            where = "and could not be kept" if kept is None else f"and is kept in {kept}"
            say(f"the adapter did not go into {self.pool}, {where}: {error}")
            return None, kept
        shutil.rmtree(kept, ignore_errors=True)
        done = "stored" if report.action == "store" else "merged"
        say(
            f"{self.task}: {done} in {self.pool}, slot {report.slot} serves "
            f"{', '.join(report.tasks)} ({report.reason})"
        )
        return report, None

    def _keep(self, modules: Mapping[str, Module], fields: Mapping[str, Any]) -> Path:
        name = f"{self.pool.name}-{self.task}"
        try:
            return write_adapter(_free(self.pool.with_name(name)), modules, **fields)
        except OSError:
            if self._output is None:
                raise
            return write_adapter(_free(self._output / name), modules, **fields)


def _checked_fields(model: Any) -> dict[str, Any]:
    """What write_adapter needs of a model's PEFT config.

    Raises:
        TrainingError: the model's adapter is not plain LoRA, or does not name its base.
    """
    if not is_peft(model):
        raise TrainingError(
            f"{type(unwrap(model)).__name__} has no PEFT adapter, which is what goes into a pool: "
            "train with get_peft_model(model, LoraConfig(...)), or without KMergeCallback"
        )
    configs: Any = getattr(unwrap(model), "peft_config", {})
    for name, config in configs.items():
        try:
            kind = getattr(config.peft_type, "value", config.peft_type)
            refuse_more({**config.to_dict(), "peft_type": kind})
        except ValueError as error:
            raise TrainingError(f"adapter {name!r}: {error}") from None
    refuse_unsupported(model)
    if plain := plain_parameters(model):
        raise TrainingError(
            f"{canonical_name(plain[0])} is trained beside the LoRA factors, and an adapter in a "
            "pool has only those: freeze it, or train without KMergeCallback"
        )
    # Which adapter it is, is in the names of its factors.
    active = lora_units(model)[0].a.rpartition(".lora_")[2].split(".")[1]
    told = configs[active].to_dict() if active in configs else {}
    config = getattr(checkpoint_model(model), "config", None)
    base = told.get("base_model_name_or_path") or getattr(config, "_name_or_path", None)
    if not base:
        raise TrainingError(
            f"adapter {active!r} has no base_model_name_or_path, so nothing tells whether it "
            "belongs to the pool: set it in the LoraConfig"
        )
    carried = {key: told[key] for key in CARRIED if told.get(key)}
    return {"base": str(base), "revision": told.get("revision"), "carried": carried}


def _module(unit: LoraUnit, tensors: TensorSource) -> tuple[str, Module]:
    """(name, factors) of one adapted module. Collective where they are sharded."""
    # A copy: on one process the tensors are the live ones.
    a, b = (tensors.tensor(canonical_name(name)).detach().clone() for name in (unit.a, unit.b))
    # Folders have the delta of transformers' Conv1D as [out, in], too.
    kind = "linear" if unit.kind == "fan_in_fan_out" else unit.kind
    pair = pair_of(kind, a, b, unit.scale)
    kernel = tuple(a.shape[2:]) if kind == "conv" else ()
    return unit.name.removesuffix(".weight"), Module(kind, pair, kernel)


def _free(path: Path) -> Path:
    """`path`, or the first of `path-2`, ... that does not exist."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    )
    return next(found for found in names if not found.exists())
