"""Runs that train LoRA adapters: merged on factors, resumed exactly, exported whole."""

from pathlib import Path

import pytest
import torch
from soup_runs import load, make_trainer, saved_base, weights_of
from transformers import Trainer

from soupkit import ExportConfig, SoupConfig
from soupkit.errors import TrainingError
from soupkit.restore import restore
from soupkit.training import SoupCallback
from soupkit.training.params import ParamStore

peft = pytest.importorskip("peft")
# PEFT 0.21.2 reads an attribute that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = SoupConfig(merge_every_n_steps=2, rank=3, feed_back=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return saved_base(tmp_path_factory.mktemp("base") / "base")


def adapted(base: Path, **changes):
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **changes}
    torch.manual_seed(1)
    return peft.get_peft_model(load(base), peft.LoraConfig(**settings))


def trainer(base: Path, folder: Path, *callbacks, **changes) -> Trainer:
    model = adapted(base, **changes.pop("lora", {}))
    return make_trainer(base, folder, callbacks, model=model, learning_rate=3e-2, **changes)


def delta_of(weights: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    a, b = (weights[f"{module}.lora_{part}.default.weight"].double() for part in "AB")
    return 2.0 * b @ a


def test_a_merge_is_the_mean_of_the_deltas_not_of_the_factors(base, tmp_path):
    """TB70: the mean of factors has cross terms; here at the adapter's own rank."""
    seen = {}

    class Watching(SoupCallback):
        def _merge_at(self, step):
            before = weights_of(self._run.store.model)
            super()._merge_at(step)
            seen[step] = (before, weights_of(self._run.store.model))

    callback = Watching(SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True))
    trainer(base, tmp_path, callback, max_steps=4).train()
    module = "base_model.model.model.layers.0.mlp.down_proj"
    partner, (before, after) = delta_of(seen[2][1], module), seen[4]
    u, s, vh = torch.linalg.svd((delta_of(before, module) + partner) / 2)
    expected = (u[:, :3] * s[:3]) @ vh[:3]
    assert float(partner.norm()) > 0.01
    torch.testing.assert_close(delta_of(after, module), expected, rtol=1e-5, atol=1e-6)
    (report,) = callback.reports
    assert report.accepted
    assert len(report.matrices) == 4
    parts = ("mlp.down_proj", "self_attn.q_proj")
    names = {f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in parts}
    assert {matrix.name for matrix in report.matrices} == names


def test_the_export_is_what_merge_and_unload_gives(base, tmp_path):
    export = ExportConfig(family=tmp_path / "family", name="adapter", encoding="row-x4")
    run = trainer(base, tmp_path / "run", SoupCallback(CONFIG, export=export))
    run.train()
    restored = restore(tmp_path / "family", "adapter", out=tmp_path / "dense", base=base)
    assert restored is not None
    whole = weights_of(run.model.merge_and_unload())
    dense = weights_of(load(tmp_path / "dense"))
    start = weights_of(load(base))
    name = "model.layers.1.mlp.down_proj.weight"
    assert set(dense) == set(whole)
    # Four planes leave a small part of the delta; what no adapter changes is the base's.
    error = (dense[name] - whole[name]).norm() / (whole[name] - start[name]).norm()
    assert error < 0.3
    unchanged = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(dense[unchanged], start[unchanged])


@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["norm"], "use_rslora": True}])
def test_a_resumed_run_is_the_uninterrupted_one(base, tmp_path, lora):
    """TB43: a resume that trains a fresh adapter would be noticed, too."""
    settings = {"save_strategy": "steps", "save_steps": 1, "lora": lora}
    whole = trainer(base, tmp_path / "whole", SoupCallback(CONFIG), **settings)
    whole.train()
    trainer(base, tmp_path / "run", SoupCallback(CONFIG), max_steps=5, **settings).train()
    again = SoupCallback(CONFIG)
    resumed = trainer(base, tmp_path / "run", again, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert [report.step for report in again.reports] == [4, 6, 8]
    one, two = weights_of(whole.model), weights_of(resumed.model)
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_a_refused_merge_leaves_every_bit(base, tmp_path):
    class Worse(SoupCallback):
        def _gate(self, trainer, preparation):
            scores = iter(range(100))
            return lambda: float(next(scores))

    seen = []

    class Watching(Worse):
        def _merge_at(self, step):
            before = weights_of(self._run.store.model)
            super()._merge_at(step)
            after = weights_of(self._run.store.model)
            seen.append(all(torch.equal(value, after[name]) for name, value in before.items()))

    callback = Watching(SoupConfig(merge_every_n_steps=1, rank=3, undo="memory", feed_back=True))
    trainer(base, tmp_path, callback, max_steps=3).train()
    assert [report.accepted for report in callback.reports] == [False, False]
    assert all(seen)


def test_what_is_no_lora_is_refused_before_training(base, tmp_path):
    with pytest.raises(TrainingError, match="DoRA"):
        trainer(base, tmp_path, SoupCallback(CONFIG), lora={"use_dora": True}).train()


def test_the_store_of_an_adapter_holds_its_factors_only(base):
    store = ParamStore(adapted(base), include=["q_proj"])
    assert [unit.name for unit in store.units] == [
        f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)
    ]
    assert all("lora_" in name for name in store.names)
    assert len(store.names) == 4
