"""KMergeCallback: the adapter of a run goes into a pool as PEFT would have saved it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from soup_runs import load, make_trainer, saved_base, weights_of
from test_training_sharded import launch
from torch import nn
from transformers import TrainerCallback

from soupkit import ExportConfig, SoupConfig
from soupkit.adapter_folder import open_adapter
from soupkit.errors import PoolError, TrainingError
from soupkit.kmerge import PoolRule
from soupkit.pool import AdapterPool
from soupkit.training import KMergeCallback, SoupCallback

peft = pytest.importorskip("peft")
# PEFT 0.21.2 reads an attribute that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

RULE = PoolRule(capacity_bytes=10**6)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return saved_base(tmp_path_factory.mktemp("base") / "base")


def adapted(base: Path, **changes):
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **changes}
    torch.manual_seed(1)
    return peft.get_peft_model(load(base), peft.LoraConfig(**settings))


def trainer(base: Path, folder: Path, *callbacks, **changes):
    model = changes.pop("model", None) or adapted(base, **changes.pop("lora", {}))
    settings = {"learning_rate": 3e-2, "max_steps": 2, **changes}
    return make_trainer(base, folder, callbacks, model=model, **settings)


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    return {name: module.pair.matrix() for name, module in open_adapter(folder).load().items()}


def saved(run, folder: Path) -> Path:
    run.model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def test_the_pool_gets_what_peft_saves(base, tmp_path):
    callback = KMergeCallback(pool=tmp_path / "pool", task="coder", rule=RULE)
    lora = {"task_type": "CAUSAL_LM", "rank_pattern": {"down_proj": 2}, "lora_alpha": 6}
    lora["alpha_pattern"] = {"down_proj": 4}
    run = trainer(base, tmp_path / "run", callback, lora=lora)
    run.train()
    theirs = saved(run, tmp_path / "peft")
    ours = AdapterPool.open(tmp_path / "pool").resolve("coder")

    assert callback.report.path == ours
    assert callback.kept is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft", "pool", "run"]
    first, second = load_file(ours / WEIGHTS), load_file(theirs / WEIGHTS)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(float(value.norm()) > 0 for name, value in first.items() if "lora_B" in name)
    told, wanted = (json.loads((p / "adapter_config.json").read_text()) for p in (ours, theirs))
    for field in ("base_model_name_or_path", "revision", "task_type", "r", "lora_alpha"):
        assert told[field] == wanted[field]
    ids = torch.arange(7)[None]
    again = peft.PeftModel.from_pretrained(load(base), ours).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, run.model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"target_modules": ["embed_tokens", "v_proj"], "r": 2},
    ],
)
def test_other_kinds_of_factors_have_the_delta_that_peft_saves(base, tmp_path, lora):
    callback = KMergeCallback(pool=tmp_path / "pool", task="coder", rule=RULE)
    run = trainer(base, tmp_path / "run", callback, lora=lora)
    run.train()
    ours, theirs = deltas(callback.report.path), deltas(saved(run, tmp_path / "peft"))
    assert ours.keys() == theirs.keys()
    for name, delta in ours.items():
        torch.testing.assert_close(delta, theirs[name], rtol=1e-5, atol=1e-7)


class Conv(nn.Module):
    """A convolution and a Conv1D, whose weight is [in, out]."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.conv, self.mixed = nn.Conv2d(2, 3, (3, 2)), Conv1D(5, 3)

    def forward(self, pixels, labels):
        found = self.mixed(self.conv(pixels).mean((2, 3)))
        return {"loss": (found - labels).square().mean(), "logits": found}


def test_convolutions_and_transposed_layers_keep_their_kinds(tmp_path):
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=2, target_modules=["conv", "mixed"], fan_in_fan_out=True)
    model = peft.get_peft_model(Conv(), lora)
    model.peft_config["default"].base_model_name_or_path = "someone/conv"
    rows = [{"pixels": torch.randn(2, 5, 4), "labels": torch.randn(5)} for _ in range(6)]
    callback = KMergeCallback(pool=tmp_path / "pool", task="coder", rule=RULE)
    settings = {"learning_rate": 3e-2, "max_steps": 2, "remove_unused_columns": False}
    run = make_trainer(tmp_path, tmp_path / "run", [callback], model=model, **settings)
    run.train_dataset = rows
    run.train()
    theirs = saved(run, tmp_path / "peft")
    first, second = load_file(callback.report.path / WEIGHTS), load_file(theirs / WEIGHTS)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


class Better(SoupCallback):
    """The side soup scores better than the live weights, whatever they are; or worse."""

    wins = True

    def _gate(self, trainer, preparation):
        scores = iter(range(100, 0, -1) if self.wins else range(100))
        return lambda: float(next(scores))


class Worse(Better):
    wins = False


class Keep(TrainerCallback):
    """The deltas after each step."""

    def __init__(self) -> None:
        self.weights = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights[state.global_step] = weights_of(model)


@pytest.mark.parametrize(("kind", "is_first"), [(Better, True), (Better, False), (Worse, True)])
def test_beside_a_soup_callback_it_is_what_the_run_ends_with(base, tmp_path, kind, is_first):
    config = SoupConfig(method="ema", ema_decay=0.5, merge_every_n_steps=2, load_at_end=True)
    soup = kind(config, export=ExportConfig(family=tmp_path / "family", name="x"))
    callback = KMergeCallback(pool=tmp_path / "pool", task="coder", rule=RULE)
    order = [callback, soup] if is_first else [soup, callback]
    keep = Keep()
    run = trainer(base, tmp_path / "run", *order, keep, max_steps=4)
    run.train()
    # load_at_end: the model has it by now.
    ends, last = saved(run, tmp_path / "peft"), keep.weights[4]
    is_live = all(torch.equal(value, last[name]) for name, value in weights_of(run.model).items())
    assert is_live == (kind is Worse)
    first, second = load_file(callback.report.path / WEIGHTS), load_file(ends / WEIGHTS)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert (tmp_path / "family" / "family.json").exists()


def test_a_second_run_is_merged_where_slots_are_full(base, tmp_path):
    rule = PoolRule(capacity_bytes=10**6, slots=1)
    for task, model in {"a": adapted(base), "b": adapted(base, r=2)}.items():
        callback = KMergeCallback(pool=tmp_path / "pool", task=task, rule=rule)
        run = trainer(base, tmp_path / task, callback, model=model, seed=ord(task))
        run.train()
        saved(run, tmp_path / f"{task}-peft")
    assert callback.report.action == "merge"
    ours = deltas(AdapterPool.open(tmp_path / "pool").resolve("a"))
    first, second = (deltas(tmp_path / f"{task}-peft") for task in "ab")
    for name, delta in ours.items():
        torch.testing.assert_close(delta, (first[name] + second[name]) / 2, rtol=1e-4, atol=1e-7)


def test_a_base_is_the_same_folder_however_it_is_written(base, tmp_path, monkeypatch):
    started(base, tmp_path, task="a")
    monkeypatch.chdir(base.parent)
    started(Path(base.name), tmp_path, task="b")
    pool = AdapterPool.open(tmp_path / "pool")
    assert sorted(pool.tasks) == ["a", "b"]
    assert pool.read().base.name == str(base)


def test_a_pool_that_refuses_keeps_the_adapter_and_the_run_ends_well(base, tmp_path, capsys):
    pool = tmp_path / "pool"
    for kept in ("pool-coder", "pool-coder-2"):
        callback = KMergeCallback(pool=pool, task="coder", rule=PoolRule(capacity_bytes=1000))
        run = trainer(base, tmp_path / "run", callback)
        assert run.train().global_step == 2
        assert callback.report is None
        assert callback.kept == tmp_path / kept
        (line,) = [x for x in capsys.readouterr().err.splitlines() if "did not go" in x]
        assert "the whole pool may take 1000" in line
        assert str(tmp_path / kept) in line
    first, second = deltas(callback.kept), deltas(saved(run, tmp_path / "peft"))
    assert all(torch.equal(delta, second[name]) for name, delta in first.items())
    assert not pool.exists()


def test_a_quality_function_that_fails_keeps_the_adapter(base, tmp_path, capsys):
    def quality(folder: Path, task: str) -> float:
        raise KeyError("no data")

    rule = PoolRule(capacity_bytes=10**6, gate_quality=0.9)
    callback = KMergeCallback(pool=tmp_path / "pool", task="a", rule=rule, quality=quality)
    trainer(base, tmp_path / "run", callback).train()
    assert callback.kept == tmp_path / "pool-a"
    assert "no data" in capsys.readouterr().err


def test_where_the_pools_disk_is_gone_the_runs_own_folder_keeps_the_adapter(base, tmp_path, capsys):
    class Unmount(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (tmp_path / "disk").rmdir()
            (tmp_path / "disk").write_text("in the way")

    (tmp_path / "disk").mkdir()
    callback = KMergeCallback(pool=tmp_path / "disk" / "pool", task="a", rule=RULE)
    run = trainer(base, tmp_path / "run", callback, Unmount(), max_steps=1)
    run.train()
    assert (callback.report, callback.kept) == (None, tmp_path / "run" / "pool-a")
    assert f"is kept in {callback.kept}" in capsys.readouterr().err
    first, second = deltas(callback.kept), deltas(saved(run, tmp_path / "peft"))
    assert all(torch.equal(delta, second[name]) for name, delta in first.items())


def test_what_is_not_finite_is_told_and_not_kept(base, tmp_path, capsys):
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).fill_(float("nan"))

    callback = KMergeCallback(pool=tmp_path / "pool", task="a", rule=RULE)
    trainer(base, tmp_path / "run", callback, Spoil(), max_steps=1).train()
    assert (callback.report, callback.kept) == (None, None)
    assert "could not be kept" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def started(base: Path, folder: Path, model=None, **options):
    options = {"pool": folder / "pool", "task": "coder", "rule": RULE, **options}
    trainer(base, folder / "run", KMergeCallback(**options), model=model).train()


def test_a_model_without_an_adapter_is_refused_by_name(base, tmp_path):
    with pytest.raises(TrainingError, match="LlamaForCausalLM has no PEFT adapter"):
        started(base, tmp_path, load(base))


@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True},
        {"bias": "lora_only"},
        {"modules_to_save": ["norm"]},
        {"init_lora_weights": "pissa"},
    ],
)
def test_what_is_more_than_lora_is_refused_in_the_words_of_its_folder(base, tmp_path, lora):
    model = adapted(base, **lora)
    with pytest.raises(TrainingError) as live:
        started(base, tmp_path, model)
    model.save_pretrained(tmp_path / "peft")
    with pytest.raises(Exception, match="adapter_config") as stored:
        open_adapter(tmp_path / "peft")
    words = str(stored.value).partition("adapter_config.json: ")[2]
    assert words
    assert str(live.value) == f"adapter 'default': {words}"


def test_what_is_trained_beside_the_factors_is_refused(base, tmp_path):
    model = adapted(base)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"norm\.weight is trained beside"):
        started(base, tmp_path, model)


def test_another_kind_of_adapter_is_refused(base, tmp_path):
    model = peft.get_peft_model(
        load(base),
        peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    )
    with pytest.raises(TrainingError, match="peft_type is 'IA3'; only LORA"):
        started(base, tmp_path, model)


def test_pools_that_will_not_take_it_are_refused_before_training(base, tmp_path):
    model = adapted(base)

    def refused(words: str, kind: type[Exception] = PoolError, **options) -> None:
        with pytest.raises(kind, match=words):
            started(base, tmp_path, model, **options)

    refused("is no pool yet", rule=None)
    started(base, tmp_path)
    refused("has the task 'coder' already")
    scored = {"task": "two", "quality": lambda folder, task: 1.0}
    refused("gate_quality=None with quality", ValueError, **scored)
    refused("capacity_bytes=10", ValueError, task="two", rule=PoolRule(capacity_bytes=10))
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file", tmp_path / "file" / "pool"):
        refused("no pool can be made there", pool=place)
    model.peft_config["default"].base_model_name_or_path = "someone/else"
    refused("task 'two' is an adapter of someone/else, the pool of", task="two", rule=None)


def check_two_ranks(kind: str, base: Path, folder: Path) -> dict:
    launch("pool_runs.py", str(folder), str(base), kind, folder=folder, timeout=300)
    results = json.loads((folder / "results.json").read_text())
    assert results["reports"] == [[0, "store"]] * 2
    assert results["kept"] == [True, True]
    ours = load_file(AdapterPool.open(folder / "pool").resolve("first") / WEIGHTS)
    wanted = torch.load(folder / "factors.pt")
    assert {name.removeprefix("base_model.model.") for name in ours} == {
        name.removeprefix("base_model.model.") for name in wanted
    }
    assert all(torch.equal(value, wanted[name]) for name, value in ours.items())
    assert any(float(value.norm()) > 0 for name, value in ours.items() if "lora_B" in name)
    return results


@pytest.mark.slow
def test_two_ranks_slice_add_one_adapter_and_both_go_on_where_the_pool_refuses(base, tmp_path):
    results = check_two_ranks("DDP", base, tmp_path)
    assert results["refused"] == [[True, str(tmp_path / "small-big")]] * 2
    assert not (tmp_path / "small").exists()
    assert len(open_adapter(tmp_path / "small-big").names) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ZeRO-3 lora", "FSDP2"])
def test_sharded_factors_are_gathered(base, tmp_path, kind):
    check_two_ranks(kind, base, tmp_path)
