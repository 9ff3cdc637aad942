"""Merges under ZeRO-1/2/3, FSDP2 and FSDP1 on two ranks: the weights of one process, on every rank,
right after each merge and after the next optimizer step.

What the frameworks gather by their own calls is compared; see sharded_strategies.py. The launched
scripts assert the strategy that each run means to test.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sharded_loops import one_process
from sharded_runs import (
    CONFIG,
    FAULT_OF_ONE,
    FAULT_OF_ZERO,
    FROZEN,
    MERGES,
    REFUSED,
    SAVED,
    Rows,
    config_of,
    named,
    run,
    same_bits,
)
from soup_runs import reference_merge, saved_base

from soupkit.budget import export_within
from soupkit.bundle import open_family, open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import TrainingError
from soupkit.restore import restore
from soupkit.training import Soup
from soupkit.verify import verify_family

ROOT = Path(__file__).resolve().parents[1]
FLOAT32 = {"rtol": 2e-5, "atol": 2e-6}

QUICK = ["odd/DDP", "odd/ZeRO-1", "odd/ZeRO-2", "odd/ZeRO-3", "odd/FSDP2", "tied/ZeRO-3"]
QUICK += ["lora/ZeRO-3", "lora/FSDP2"]
SLICE = [
    "tied/FSDP2",
    "odd/FSDP1",
    "odd/ZeRO-2 bf16",
    "odd/ZeRO-3 bf16",
    "frozen/ZeRO-3",
    "reset/ZeRO-3",
    "lora/ZeRO-3 bf16",
]
SLOW = [
    "tied/ZeRO-1",
    "tied/ZeRO-2",
    "odd/ZeRO-3 whole",
    "odd/ZeRO-2 offload",
    "odd/ZeRO-3 offload",
    "odd/ZeRO-3 offload all",
    "frozen/ZeRO-2",
    "frozen/FSDP2",
    "frozen/FSDP1",
    "tied/FSDP1",
    "odd/FSDP1 flat",
    "tied/FSDP1 flat",
    "reset/ZeRO-1",
    "reset/ZeRO-2",
    "reset/FSDP2",
    "reset/FSDP1",
    "reset/FSDP1 flat",
    "odd/ZeRO-0 bf16",
    "odd/ZeRO-1 bf16",
    "odd/ZeRO-1 bf16 float32 sums",
    "tied/ZeRO-2 bf16",
    "odd/ZeRO-3 whole bf16",
    "tied/ZeRO-3 bf16",
    "odd/FSDP2 bf16",
    "odd/FSDP1 bf16",
    "lora/DDP",
    "lora/ZeRO-1",
    "lora/ZeRO-2",
    "lora/ZeRO-3 whole",
    "lora/ZeRO-2 bf16",
    "lora/FSDP1",
]
FRAMEWORKS = [
    f"{framework}/{kind}"
    for framework in ("accelerate", "own", "trainer")
    for kind in ("ZeRO-2", "ZeRO-3", "FSDP2")
] + ["trainer/ZeRO-3 init", "trainer/ZeRO-3 lora"]


def launch(script: str, *arguments: str, folder: Path, timeout: float, ranks: int = 2) -> None:
    """Ranks of a script; without a compiler, and with DeepSpeed's caches in `folder`."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # A build that was killed leaves a lock in the common folder, and the next one hangs on it.
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "CXX": "/no/compiler/is/needed",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    command += [str(ranks), str(ROOT / "tests" / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-6000:]


class Records:
    """What the two ranks of each run left, and the same run in one process."""

    def __init__(self, names: list[str], folder: Path, *, timeout: float) -> None:
        self.folder = folder
        launch("sharded_runs.py", str(folder), *names, folder=folder, timeout=timeout)
        self._plain: dict[str, dict] = {}

    def of(self, name: str) -> list[dict]:
        reason = self.folder / "no-deepspeed.txt"
        if "ZeRO" in name and reason.exists():
            pytest.skip(f"DeepSpeed does not run here: {reason.read_text()}")
        return [torch.load(self.folder / f"{name.replace('/', ' ')} {rank}.pt") for rank in (0, 1)]

    def plain(self, name: str) -> dict:
        model = name.split("/")[0]
        if model not in self._plain:
            self._plain[model] = run(
                named(f"{model}/plain"), self.folder / f"plain-{model}", config_of(name)
            )
        return self._plain[model]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return Records(QUICK, tmp_path_factory.mktemp("quick"), timeout=300)


def assert_equals_one_process(records: Records, name: str) -> None:
    plain = records.plain(name)
    assert plain["accepted"] == list(MERGES)
    for record in records.of(name):
        assert record["accepted"] == list(MERGES)
        assert same_bits(record["start"], plain["start"])
        for step in (2, *MERGES, 7):
            for tensor_name, value in plain["after"][step].items():
                found = record["after"][step][tensor_name]
                torch.testing.assert_close(found, value, **FLOAT32, msg=f"{tensor_name} at {step}")


def deltas_of_lora(weights: dict) -> dict[str, torch.Tensor]:
    """Name of a base weight as its file has it -> scale B A in float64; see adapted_llama."""
    end = ".lora_A.default.weight"
    return {
        name.removeprefix("base_model.model.").replace(end, ".weight"): 20.0
        * (weights[name.replace("lora_A", "lora_B")].double() @ value.double())
        for name, value in weights.items()
        if name.endswith(end)
    }


def assert_is_the_rule_of_lora(record: dict) -> None:
    """TB70: the mean of the products, cut to the adapter's own rank; the base stays."""
    step = MERGES[0]
    start, before, after = record["start"], record["before"][step], record["after"][step]
    partner, now, then = map(deltas_of_lora, (record["after"][2], before, after))
    for name, merged in then.items():
        u, s, vh = torch.linalg.svd((now[name] + partner[name]) / 2)
        assert float(s[0]) > 1e-2
        expected = (u[:, :3] * s[:3]) @ vh[:3]
        torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-6)
    frozen = [name for name in start if "lora_" not in name]
    assert len(frozen) + 2 * len(then) == len(start)
    assert all(torch.equal(start[name], after[name]) for name in frozen)


def assert_is_the_rule(record: dict, name: str) -> None:
    """The first merge against float64 numpy, from what the framework gathered before it."""
    if name.startswith("lora"):
        assert_is_the_rule_of_lora(record)
        return
    partner, step = record["after"][2], MERGES[0]
    for tensor_name, start in record["start"].items():
        before, after = record["before"][step][tensor_name], record["after"][step][tensor_name]
        if name.startswith("frozen") and tensor_name == FROZEN:
            assert torch.equal(after, start)
            continue
        assert not torch.equal(before, after), tensor_name
        expected = reference_merge(start, before, partner[tensor_name], rank=3, weight=0.5)
        torch.testing.assert_close(after, torch.from_numpy(expected).float(), **FLOAT32)


def assert_ranks_hold_the_same(first: dict, second: dict) -> None:
    for moment in ("before", "after", "copies"):
        assert first[moment].keys() == second[moment].keys()
        for step, weights in first[moment].items():
            assert same_bits(weights, second[moment][step]), (moment, step)


def assert_old_weights_return(record: dict) -> None:
    faults = record["faults"]
    assert faults["refused"]
    assert "out of memory" in faults["one"]
    assert "disk full" in faults["zero"]
    assert record["before"].keys() - record["after"].keys() == {FAULT_OF_ONE, FAULT_OF_ZERO}
    assert same_bits(record["before"][REFUSED], record["after"][REFUSED])
    for step in (FAULT_OF_ONE, FAULT_OF_ZERO):
        assert same_bits(record["before"][step], record["restored"][step]), step


def whole_weights(weights: dict) -> dict[str, torch.Tensor]:
    """As a checkpoint without an adapter has them."""
    deltas = deltas_of_lora(weights)
    found = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for name, value in weights.items()
        if "lora_" not in name
    }
    return {name: v + deltas[name] if name in deltas else v for name, v in found.items()}


def assert_exported(record: dict, folder: Path, out: Path) -> None:
    """The variant is what the framework gathers at the end; four signs leave little of a delta."""
    assert verify_family(folder / "family") == []
    restore(folder / "family", "end", out=out)
    restored = open_checkpoint(out)
    start, end = whole_weights(record["start"]), whole_weights(record["end"])
    assert set(restored.names) == set(end)
    changed = [name for name, value in end.items() if not torch.equal(value, start[name])]
    assert len(changed) >= 4
    for name, value in end.items():
        found = restored.tensor(name).float()
        if name not in changed or value.dim() == 1:
            assert torch.equal(found, value.float()), name
        else:
            assert (found - value).norm() < 0.35 * (value - start[name]).norm(), name
    files = [*folder.rglob("*.safetensors")]
    assert len(files) >= 2
    for path in files:
        with safe_open(path, "pt") as opened:
            assert all(0 not in opened.get_slice(n).get_shape() for n in opened.keys()), path  # noqa: SIM118


def assert_copies_are_rounded_masters(record: dict) -> None:
    for step, copies in record["copies"].items():
        for name, value in copies.items():
            assert torch.equal(value, record["after"][step][name].to(value.dtype)), (step, name)
    assert record["is_kept"]


def assert_all(records: Records, name: str) -> None:
    first, second = records.of(name)
    assert_ranks_hold_the_same(first, second)
    for record in (first, second):
        assert record["accepted"] == list(MERGES)
        assert_is_the_rule(record, name)
        assert_copies_are_rounded_masters(record)
        assert_old_weights_return(record)
    if "bf16" not in name:
        assert_equals_one_process(records, name)
        return
    for tensor_name, value in records.plain(name)["after"][7].items():
        # Weights are about 1, and a bfloat16 has 8 bits. A frozen one has no float32 master.
        found = first["after"][7][tensor_name].float()
        torch.testing.assert_close(found, value, rtol=0, atol=0.05)
    if "ZeRO" in name:
        # A merge in bfloat16 would leave masters that bfloat16 can hold.
        merged = first["after"][MERGES[0]].values()
        masters = [value for value in merged if value.dtype == torch.float32]
        assert any(not torch.equal(v, v.bfloat16().float()) for v in masters)


@pytest.mark.parametrize("name", QUICK)
def test_sharded_equals_one_process(quick, name):
    """TB01, TB02, TB03, TB04, TB08, TB10, TB11: after each merge and the next step, what the
    framework itself gathers on every rank.
    """
    for record in quick.of(name):
        assert_copies_are_rounded_masters(record)
    assert_equals_one_process(quick, name)


@pytest.mark.parametrize("name", QUICK)
def test_a_forward_sees_the_merged_weights(quick, name):
    plain, ranks = quick.plain(name)["losses"], [record["losses"] for record in quick.of(name)]
    means = [(a + b) / 2 for a, b in zip(*ranks, strict=True)]
    assert means == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("name", QUICK)
def test_a_merge_is_the_documented_rule(quick, name):
    for record in quick.of(name):
        assert_is_the_rule(record, name)


@pytest.mark.parametrize("name", QUICK)
def test_ranks_hold_the_same_bits(quick, name):
    assert_ranks_hold_the_same(*quick.of(name))


@pytest.mark.parametrize("name", QUICK)
def test_a_refused_merge_and_one_that_fails_leave_the_old_bits(quick, name):
    """TB07, TB27: a fault on one rank reaches both, in the score and in what rank 0 writes."""
    for record in quick.of(name):
        assert_old_weights_return(record)


@pytest.mark.parametrize("name", [name for name in QUICK if "DDP" not in name])
def test_no_rank_ever_gathers_more_than_a_few_matrices(quick, name):
    """TB14, TB15: of two ranks' matrices, in merges, captures, undos and the export."""
    for record in quick.of(name):
        wholes = record["wholes"]
        everything = sum(4 * value.numel() for value in record["end"].values())
        assert 0 < wholes["peak"] <= 3 * wholes["largest"] < everything / 2
        assert wholes["left"] == 0


@pytest.mark.parametrize("name", QUICK)
def test_a_run_is_exported_as_it_ends(quick, name, tmp_path):
    """TB75: whole weights and adapters; no file has an empty tensor in place of a sharded one."""
    assert_exported(quick.of(name)[0], quick.folder / name.replace("/", " "), tmp_path / "dense")


class Held:
    """Whole weights as a TensorSource."""

    def __init__(self, weights: dict) -> None:
        self._weights, self.names = weights, tuple(sorted(weights))

    def shape(self, name):
        return tuple(self._weights[name].shape)

    def dtype(self, name):
        return self._weights[name].dtype

    def tensor(self, name):
        return self._weights[name]


@pytest.mark.parametrize("name", [name for name in QUICK if "lora" not in name])
def test_auto_reads_a_run_twice_and_is_what_one_process_exports(quick, name, tmp_path):
    record, folder = quick.of(name)[0], quick.folder / name.replace("/", " ")
    base, end = open_checkpoint(folder / "soup" / "base"), whole_weights(record["end"])
    held = Held({one: end[one] for one in base.names})
    alone = export_within(base, held, family=tmp_path / "family", name="auto")
    family = open_family(folder / "family")
    assert family.variants["auto"].digest == alone.export.digest
    manifest = open_variant(family.folder("auto")).manifest
    assert manifest.budget == alone.plan.to_json()


@pytest.mark.parametrize("name", QUICK)
def test_one_process_goes_on_where_two_ranks_were_saved(quick, name, tmp_path):
    """Another world size: the state's checksum does not depend on how weights were sharded."""
    weights = quick.of(name)[0]["after"][SAVED]
    folder = tmp_path / "run"
    shutil.copytree(quick.folder / name.replace("/", " "), folder)
    strategy = named(f"{name.split('/')[0]}/plain")
    soup = Soup(
        strategy.model,
        optimizer=strategy.optimizer,
        config=CONFIG,
        evaluate=lambda: -float(next(calls)),
        output_dir=folder,
    )
    calls = itertools.count()
    with torch.no_grad():
        for parameter_name, parameter in strategy.inner.named_parameters():
            parameter.copy_(weights[parameter_name])
    soup.load(folder / "checkpoint")
    for step in (7, 8):
        strategy.step(Rows().batch(step))
        report = soup.step()
    assert (report.step, report.partner_step, report.accepted) == (8, 6, True)


def test_other_weights_than_the_saved_ones_are_refused(quick, tmp_path):
    """TB43: the checksum of a sharded run is compared, not only written."""
    folder = tmp_path / "run"
    shutil.copytree(quick.folder / "odd FSDP2", folder)
    strategy = named("odd/plain")
    soup = Soup(strategy.model, config=CONFIG, evaluate=lambda: 0.0, output_dir=folder)
    with pytest.raises(TrainingError, match="not those of"):
        soup.load(folder / "checkpoint")


@pytest.mark.slow
def test_slice_of_strategies(tmp_path):
    """TB01, TB03, TB04, TB06, TB12, TB47: bfloat16 copies, a frozen parameter, FSDP1."""
    records = Records(SLICE, tmp_path, timeout=600)
    for name in SLICE:
        assert_all(records, name)


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    return Records(SLOW, tmp_path_factory.mktemp("rest"), timeout=1800)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_strategy(rest, name):
    """TB01, TB03, TB04, TB06, TB12, TB47: offload, persistent ZeRO-3, every kind of master."""
    assert_all(rest, name)


def result_of(part: str, tmp_path: Path) -> dict:
    base = saved_base(tmp_path / "base", dropout=0.1)
    launch("sharded_frameworks.py", str(tmp_path), str(base), part, folder=tmp_path, timeout=900)
    result = json.loads((tmp_path / "results.json").read_text())[part]
    if "skipped" in result:
        pytest.skip(f"DeepSpeed does not run here: {result['skipped']}")
    return result


def assert_resumes(part: str, tmp_path: Path) -> None:
    assert result_of(part, tmp_path) == {
        "different_data": True,
        "equal": True,
        "resumed": [True, True],
        "merges": [4, 6, 8] if part.startswith("trainer") else [4, 6],
    }
    assert verify_family(tmp_path / part / "family") == []


@pytest.mark.slow
@pytest.mark.parametrize("part", ["trainer/ZeRO-3"])
def test_slice_of_frameworks(part, tmp_path):
    """TB01, TB07, TB21: bfloat16, partitioned; the resumed run equals the uninterrupted one."""
    assert_resumes(part, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in FRAMEWORKS if part != "trainer/ZeRO-3"])
def test_framework(part, tmp_path):
    """TB07, TB18, TB19, TB21, TB36, TB43: Accelerate and Trainer shard, merge, resume, export."""
    assert_resumes(part, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["best/ZeRO-3", "best/FSDP2"])
def test_the_best_checkpoint_of_a_sharded_run_is_exported(part, tmp_path):
    """TB36, TB37: loaded at the end, over states of the optimizer and whatever was merged since."""
    assert result_of(part, tmp_path) == {"best": 1, "is_loaded": True, "is_exported": True}
    assert verify_family(tmp_path / part / "family") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ZeRO-2", "ZeRO-3", "FSDP2"])
def test_two_ranks_go_on_where_one_process_was_saved(kind, tmp_path):
    """TB43: the state of a run is the same for any number of ranks."""
    assert one_process(tmp_path / "one" / kind) == [4, 6]
    assert result_of(f"one/{kind}", tmp_path) == {"merges": [6], "refused": True, "differs": []}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ZeRO-2", "ZeRO-3", "FSDP2"])
def test_a_checkpoint_that_knew_no_soup(kind, tmp_path):
    """TB30, TB42: with the base named it goes on, with nothing known of the base it is refused."""
    assert result_of(f"foreign/{kind}", tmp_path) == {
        "refused": [True, True],
        "merges": [6],
        "differs": [],
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ZeRO-1 bf16", "ZeRO-3 bf16"])
def test_steps_that_an_engine_skips_do_not_count(kind, tmp_path):
    """TB44: gradients that overflow leave the masters as they are."""
    assert result_of(f"skipping/{kind}", tmp_path) == {
        "overflows": 3,
        "counted": [0, 1, 2, 2, 2, 3, 4],
        "moved": [False, True, True, False, False, True, True],
        "merges": [4],
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ZeRO-2", "ZeRO-3"])
def test_an_engine_that_accumulates_is_counted_by_its_steps(kind, tmp_path):
    """TB44: optimizer steps, not micro-batches."""
    assert result_of(f"accumulating/{kind}", tmp_path) == {
        "counted": [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4],
        "moved": [3, 6, 9, 12],
        "merges": [4],
    }
