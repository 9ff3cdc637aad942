"""One fine-tune, and every way to merge it: what training never sees shares one run.

Each way is a Soup of the library with its own folder, and is judged by what `finish` leaves in the
model. Only merges that are fed back train anew.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from soup_study_tasks import Batch, Setting, losses
from transformers import AutoModelForCausalLM, get_scheduler

from soupkit import SoupConfig
from soupkit.checkpoint import open_checkpoint
from soupkit.merge import MergeRule
from soupkit.offline import merge_checkpoints
from soupkit.training import Soup

PLAIN, BEST, LAST = "no merging", "best checkpoint, no merging", "mean of the last 3"
SCHEDULES = ("constant", "linear", "cosine")
_METHODS: dict[str, dict[str, Any]] = {
    "mean": {"method": "mean"},
    "svd_mean 16": {"rank": 16},
    "svd_mean 64": {"rank": 64},
    "svd_mean 256": {"rank": 256},
    "monosoup": {"method": "monosoup"},
}
Result = dict[str, Any]


def arms(setting: Setting, *, few: bool) -> dict[str, SoupConfig]:
    """Every way to merge, by its name in the table. Args: few: those that a large model can pay."""
    steps, every = setting.steps, setting.merge_every
    side = {"merge_every_n_steps": every, "feed_back": False}
    fed = {"merge_every_n_steps": every, "feed_back": True}
    ema = {**side, "method": "ema"}
    found = {"ema, ungated": SoupConfig(**ema, gate="none"), "ema": SoupConfig(**ema)}
    for name, method in _METHODS.items():
        if not few or name != "monosoup":
            found[f"{name}, side"] = SoupConfig(**side, **method)
        if not few and name in ("mean", "svd_mean 64"):
            found[f"{name}, side, ungated"] = SoupConfig(**side, **method, gate="none")
        if name in ("mean", "svd_mean 64") or not (few or name == "svd_mean 256"):
            found[f"{name}, fed back"] = SoupConfig(**fed, **method)
    if not few:
        half = {**fed, **_METHODS["svd_mean 64"]}
        found["svd_mean 64, fed back, ungated"] = SoupConfig(**half, gate="none")
        found["svd_mean 64, fed back, first half"] = SoupConfig(**half, stop_after_step=steps // 2)
    return found


def default_arm(setting: Setting) -> str:
    """Name of the way that SoupConfig's defaults are, but for the steps between merges."""
    default = SoupConfig(merge_every_n_steps=setting.merge_every)
    return next(name for name, config in arms(setting, few=False).items() if config == default)


class Scores:
    """Losses of the live weights, of each example; equal weights are scored once."""

    def __init__(self, model: torch.nn.Module, batches: list[Batch]) -> None:
        self._model, self._batches = model, batches
        self._known: dict[str, list[float]] = {}

    def __call__(self) -> list[float]:
        digest = weights_digest(self._model)
        if digest not in self._known:
            self._known[digest] = losses(self._model, self._batches)
        return self._known[digest]


def weights_digest(model: torch.nn.Module) -> str:
    digest = hashlib.blake2b()
    for value in model.parameters():
        digest.update(value.detach().numpy())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Run:
    """What is trained, and where its files may lie."""

    setting: Setting
    amount: str
    schedule: str
    seed: int
    folder: Path

    def train(self, model: torch.nn.Module, after_step: Callable[[int], None]) -> None:
        """AdamW and a schedule after a short warm-up. Args: after_step: called with 1, 2, ..."""
        setting = self.setting
        rate = setting.learning_rate
        optimizer = torch.optim.AdamW(
            [value for value in model.parameters() if value.requires_grad],
            lr=rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
        )
        kind = "constant_with_warmup" if self.schedule == "constant" else self.schedule
        scheduler = get_scheduler(kind, optimizer, max(1, setting.steps // 20), setting.steps)
        stream = setting.batches(setting.examples[self.amount], self.seed)
        for step in range(1, setting.steps + 1):
            model(**next(stream)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            after_step(step)

    def soup(self, model: torch.nn.Module, name: str, config: SoupConfig, gate: Scores) -> Soup:
        return Soup(
            model,
            base=self.setting.base,
            config=config,
            evaluate=gate if config.gate == "metric" else None,
            output_dir=self.folder / name.replace(" ", "-"),
        )

    def fed_back(self, name: str, config: SoupConfig) -> Result:
        """Train with merges in the loop."""
        model = self.setting.model()
        soup = self.soup(model, name, config, Scores(model, self.setting.gate(self.seed)))
        self.train(model, lambda step: soup.step() and None)
        soup.finish()
        return result_of(soup, fmean(losses(model, self.setting.test)))

    def shared(self, configs: dict[str, SoupConfig]) -> dict[str, Result]:
        """Train without merging, with all side soups beside it."""
        setting, model = self.setting, self.setting.model()
        gate, test = Scores(model, setting.gate(self.seed)), Scores(model, setting.test)
        soups = {name: self.soup(model, name, config, gate) for name, config in configs.items()}
        kept: dict[Path, float] = {}

        def after_step(step: int) -> None:
            for soup in soups.values():
                soup.step()
            if step % setting.merge_every == 0:
                path = self.folder / f"step-{step}"
                model.save_pretrained(path)
                kept[path] = fmean(gate())

        self.train(model, after_step)
        live = {key: value.clone() for key, value in model.state_dict().items()}
        plain, results = fmean(test()), {}
        for name, soup in soups.items():
            soup.finish()
            loss = fmean(test())
            results[name] = {**result_of(soup, loss), "is_soup": loss != plain}
            model.load_state_dict(live)
        best = min(kept, key=lambda path: kept[path])
        results[PLAIN] = {"loss": plain}
        results[BEST] = {"loss": loss_of(best, setting.test)}
        results[LAST] = {"loss": loss_of(self.mean_of(list(kept)[-3:]), setting.test)}
        return results

    def mean_of(self, paths: list[Path]) -> Path:
        """The plain mean of checkpoints, as `soupkit merge --method mean` makes it."""
        base = open_checkpoint(self.setting.base)
        checkpoints = [open_checkpoint(path) for path in paths]
        return merge_checkpoints(
            base, checkpoints, out=self.folder / "mean", rule=MergeRule("mean"), dtype=torch.float32
        ).path


def result_of(soup: Soup, loss: float) -> Result:
    refused = sum(not report.accepted for report in soup.reports)
    return {"loss": loss, "merges": len(soup.reports), "refused": refused}


def loss_of(path: Path, batches: list[Batch]) -> float:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return fmean(losses(model, batches))


def in_scratch(out: Path, work: Callable[[Path], Any]) -> Any:
    """Do `work` in a folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    try:
        return work(folder)
    finally:
        shutil.rmtree(folder)
