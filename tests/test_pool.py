"""A pool of adapters on disk: what it holds after any event, PEFT's word on slots, bad input."""

import json
import math
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_zoo import MODULES, PARAMETERS, TOKENS, Zoo, adapted, deltas_of, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from pool_kit import ONE, check_pool, deltas, make_adapter, snapshot
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from soupkit.cli import app
from soupkit.errors import CheckpointError, MergeError, PoolError, SoupkitError
from soupkit.kmerge import PoolRule
from soupkit.pool import AdapterPool

# PEFT warns of what the zoo has on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:.*target_parameters")

HUGE = 2**40


def make_pool(folder: Path, **rule) -> AdapterPool:
    return AdapterPool.create(folder, PoolRule(**{"capacity_bytes": HUGE, **rule}))


def add_all(pool: AdapterPool, folder: Path, seeds, **options) -> list:
    return [pool.add(make_adapter(folder / f"t{seed}", seed, **options)) for seed in seeds]


# ---- what holds after any event ----

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "remove", "touch"]),
        st.integers(0, 7),
        st.sampled_from([("m.q", "m.v", "m.o"), ("m.q",), ("m.v", "m.o")]),
        st.sampled_from([1, 2, 5]),
    ),
    min_size=3,
    max_size=10,
)


@settings(max_examples=12, deadline=None)
@given(
    EVENTS,
    st.integers(2 * ONE, 5 * ONE),
    st.none() | st.integers(1, 3),
    st.sampled_from(["history_mean", "opcm", "ties", "dare"]),
    st.none() | st.floats(-1, 1),
    st.none() | st.floats(-1, 1),
    st.sampled_from(["evict", "refuse"]),
)
def test_whatever_happens_the_pool_keeps_its_budget_and_serves_each_task_once(
    tmp_path_factory, events, capacity, slots, merge, gate, below, when_full
):
    root = tmp_path_factory.mktemp("events")
    pool = make_pool(
        root / "pool",
        capacity_bytes=capacity,
        slots=slots,
        merge=merge,
        rank=3 if merge in ("ties", "dare") else None,
        gate_similarity=gate,
        open_below=below,
        when_full=when_full,
    )
    alive: set[str] = set()
    for number, (event, which, names, rank) in enumerate(events):
        task = f"t{which}"
        before, complaint = snapshot(root / "pool"), None
        try:
            if event == "add":
                source = make_adapter(root / f"a{number}", number, names=names, ranks=(rank, rank))
                report = pool.add(source, task=task)
                alive = (alive | {task}) - set(report.evicted)
            elif event == "remove":
                pool.remove(task)
                alive.discard(task)
            else:
                pool.touch(task)
        except PoolError as error:
            complaint = str(error)
        if complaint is not None:
            assert snapshot(root / "pool") == before
            assert (task in alive) == (event == "add") or "full" in complaint
        assert set(check_pool(root / "pool").tasks) == alive
        told = json.loads((root / "pool" / "pool.json").read_text())["tasks"]
        assert set(told) == alive
    shutil.rmtree(root)


def test_slots_enough_for_all_are_the_adapters_byte_for_byte(tmp_path):
    """4.7.5: K >= adapters: no merge."""
    pool = make_pool(tmp_path / "pool", slots=3)
    reports = add_all(pool, tmp_path, range(3))
    assert [report.action for report in reports] == ["store"] * 3
    for seed in range(3):
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            source = (tmp_path / f"t{seed}" / name).read_bytes()
            assert (pool.resolve(f"t{seed}") / name).read_bytes() == source
    assert reports[2].similarity is not None
    check_pool(tmp_path / "pool")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_one_slot_is_the_running_mean(tmp_path, order):
    pool = make_pool(tmp_path / "pool", slots=1)
    reports = add_all(pool, tmp_path, order, ranks=(1, 3))
    assert [report.action for report in reports] == ["store", "merge", "merge", "merge"]
    each = [deltas(tmp_path / f"t{seed}") for seed in order]
    got = deltas(pool.resolve("t3"))
    for name in got:
        wanted = torch.stack([one[name] for one in each]).mean(0)
        torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=1e-6)
    (slot,) = check_pool(tmp_path / "pool").slots
    assert slot.tasks == tuple(f"t{seed}" for seed in order)


def test_plus_plus_merges_early_and_its_thresholds(tmp_path):
    for below, slots in ((-1.0, 1), (1.5, 3)):
        pool = make_pool(tmp_path / f"pool{slots}", slots=3, open_below=below)
        for seed in range(5):
            pool.add(make_adapter(tmp_path / f"p{slots}-t{seed}", seed))
        assert len(pool.slots) == slots
        check_pool(tmp_path / f"pool{slots}")


def test_the_nearest_slot_takes_it(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=2)
    add_all(pool, tmp_path, (1, 2))
    shutil.copytree(tmp_path / "t2", tmp_path / "twin")
    report = pool.add(tmp_path / "twin")
    assert (report.action, report.slot, report.tasks) == ("merge", 1, ("t2", "twin"))
    assert report.similarity == pytest.approx(1.0)
    for name, one in deltas(tmp_path / "t2").items():
        torch.testing.assert_close(deltas(report.path)[name], one, rtol=1e-5, atol=1e-6)


def test_a_merged_slot_is_cut_to_the_bytes_there_are(tmp_path):
    sources = [make_adapter(tmp_path / f"t{seed}", seed) for seed in range(4)]
    for capacity in range(1750, 2250, 150):
        pool = make_pool(tmp_path / f"pool{capacity}", capacity_bytes=capacity, slots=1)
        reports = [pool.add(source) for source in sources]
        assert reports[-1].slot_bytes == reports[-1].pool_bytes <= capacity
        assert reports[-1].lost_energy > 0.001
        # Nothing is wasted: one rank more would not fit.
        more = sum(4 * (rows + columns) for rows, columns in ((6, 9), (4, 9), (9, 6)))
        assert reports[-1].slot_bytes + more > capacity
        assert 1 <= reports[-1].rank < 6
        check_pool(tmp_path / f"pool{capacity}")


def test_half_precision_stays_half_and_mixed_becomes_wide(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=1)
    add_all(pool, tmp_path, (1, 2), dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(pool.resolve("t1") / "adapter_model.safetensors").values()} \
        == {torch.bfloat16}  # fmt: skip
    add_all(pool, tmp_path, (3,), dtype=torch.float16)
    stored = load_file(pool.resolve("t1") / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


# ---- what PEFT makes of a slot ----


@pytest.mark.parametrize("merge", ["history_mean", "opcm"])
def test_a_slot_of_every_kind_of_layer_changes_a_model_as_the_merged_deltas_say(tmp_path, merge):
    pool = make_pool(tmp_path / "pool", slots=1, merge=merge)
    models = [
        adapted(seed=1, parameters=PARAMETERS, r=2, lora_alpha=4),
        adapted(seed=2, parameters=PARAMETERS, r=3, lora_alpha=2, modules=MODULES[:4]),
    ]
    wanted: dict[str, torch.Tensor] = {}
    for number, model in enumerate(models):
        folder = saved(model, tmp_path / f"t{number}")
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "zoo"
        (folder / "adapter_config.json").write_text(json.dumps(config))
        pool.add(folder)
        for name, delta in deltas_of(model).items():
            wanted[name] = wanted.get(name, 0) + delta / 2
    loaded = PeftModel.from_pretrained(Zoo(), pool.resolve("t1"))
    got = deltas_of(loaded)
    assert got.keys() == wanted.keys()
    if merge == "history_mean":
        for name, delta in wanted.items():
            torch.testing.assert_close(got[name], delta, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        shift = loaded(TOKENS) - Zoo()(TOKENS)
    assert shift.abs().max() > 0.05
    (slot,) = check_pool(tmp_path / "pool").slots
    assert slot.norms > 0
    assert slot.norms == pytest.approx(
        sum(math.sqrt(sum(float(d.square().sum()) for d in deltas_of(m).values())) for m in models)
        if merge == "opcm"
        else math.sqrt(sum(float(d.square().sum()) for d in deltas_of(models[0]).values())),
        rel=1e-5,
    )


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: (
            name.replace(".weight", ".default.weight")
            if name.endswith(".weight")
            else f"{name}.default"
        ),
        lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    ],
    ids=["no-prefix", "adapter-name", "wrapped"],
)
def test_a_slot_loads_in_peft_whatever_its_adapters_file_calls_its_tensors(tmp_path, renamed):
    """PEFT passes over names that it does not look for, without a word."""
    model = adapted(seed=1, parameters=PARAMETERS, r=2, lora_alpha=3, use_rslora=True)
    folder = edit_config(saved(model, tmp_path / "t1"), base_model_name_or_path="zoo")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    pool = make_pool(tmp_path / "pool")
    pool.add(folder)
    got = deltas_of(PeftModel.from_pretrained(Zoo(), pool.resolve("t1")))
    for name, delta in deltas_of(model).items():
        torch.testing.assert_close(got[name], delta, rtol=1e-5, atol=1e-6)
    check_pool(tmp_path / "pool")


# ---- tasks, utility, gates, rules ----


def test_removing_a_task_of_a_merged_slot_leaves_what_was_merged(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=1)
    add_all(pool, tmp_path, (1, 2))
    before = deltas(pool.resolve("t1"))
    assert pool.remove("t2") == ("t1",)
    for name, one in deltas(pool.resolve("t1")).items():
        torch.testing.assert_close(one, before[name], rtol=0, atol=0)
    with pytest.raises(PoolError, match="no task 't2'; it has: t1"):
        pool.resolve("t2")
    # Two came in before: the third has a third of the weight.
    add_all(pool, tmp_path, (3,))
    each = [deltas(tmp_path / f"t{seed}") for seed in (1, 2, 3)]
    got = deltas(pool.resolve("t3"))["m.q"]
    torch.testing.assert_close(got, sum(one["m.q"] for one in each) / 3, rtol=1e-5, atol=1e-6)
    # It may come again.
    pool.add(tmp_path / "t2")
    assert [item.task for item in pool.slots[0].history] == ["t1", "t2", "t3", "t2"]
    for task in ("t1", "t2"):
        assert "t3" in pool.remove(task)
    assert pool.remove("t3") == ()
    assert check_pool(tmp_path / "pool").slots == ()
    add_all(pool, tmp_path, (4,))


def test_the_slot_of_least_use_makes_room(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=2, gate_similarity=0.9, when_full="evict")
    add_all(pool, tmp_path, (1, 2))
    pool.touch("t1", uses=3)
    pool.touch("t2")
    (report,) = add_all(pool, tmp_path, (3,))
    assert (report.action, report.evicted, report.slot) == ("store", ("t2",), 1)
    assert check_pool(tmp_path / "pool").tasks == {"t1": 0, "t3": 1}
    # Equal use: t1's slot was asked for before t3's came.
    pool.touch("t3", uses=3)
    assert add_all(pool, tmp_path, (4,))[0].evicted == ("t1",)


def test_the_quality_gate_scores_every_task_and_a_rejected_merge_leaves_no_trace(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=1, gate_quality=0.5)
    asked: list[tuple[str, str]] = []
    scores = {"t1": 1.0, "t2": 1.0, "t3": 1.0}

    def quality(folder: Path, task: str) -> float:
        asked.append((folder.name, task))
        is_own = folder.name == task
        assert deltas(folder)
        return 2.0 if is_own else scores[task]

    for seed in (1, 2):
        pool.add(make_adapter(tmp_path / f"t{seed}", seed), quality=quality)
    # Its own, then both on the merged folder.
    assert [task for _, task in asked] == ["t1", "t2", "t1", "t2"]
    assert [item.score for item in pool.slots[0].history] == [2.0, 2.0]
    before = snapshot(tmp_path / "pool")
    third = make_adapter(tmp_path / "t3", 3)
    for task in ("t1", "t3"):
        scores[task] = 0.9
        with pytest.raises(PoolError, match=f"the task {task} scores 0.9 instead of 2") as told:
            pool.add(third, quality=quality)
        assert "the pool is full" in str(told.value)
        assert snapshot(tmp_path / "pool") == before
        scores[task] = 1.0
    for bad in (-1.0, math.nan, "good", True):
        with pytest.raises(ValueError, match="quality gave"):
            pool.add(third, quality=lambda folder, task, bad=bad: bad)
    with pytest.raises(ValueError, match=r"gate_quality=0\.5 with quality=None"):
        pool.add(third)
    with pytest.raises(ZeroDivisionError):
        pool.add(third, quality=lambda folder, task: 1 / 0)
    assert snapshot(tmp_path / "pool") == before
    pool.add(third, quality=quality)
    check_pool(tmp_path / "pool")


def test_tasks_from_before_the_gate_are_scored_as_they_are_served(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=1)
    add_all(pool, tmp_path, (1,))
    asked = []

    def quality(folder: Path, task: str) -> float:
        asked.append((folder.name, task))
        return 1.0

    second = make_adapter(tmp_path / "t2", 2)
    pool.add(second, quality=quality, rule={"gate_quality": 1.0})
    assert asked == [("t2", "t2"), ("slot-0.1", "t1"), ("merged", "t1"), ("merged", "t2")]


def test_a_rule_changes_with_an_adapter_that_comes_in_or_not_at_all(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=2)
    add_all(pool, tmp_path, (1, 2))
    third = make_adapter(tmp_path / "t3", 3)
    before = snapshot(tmp_path / "pool")
    for change, word in (
        ({"slots": 1}, "slots=1: the pool has 2"),
        ({"capacity_bytes": 100}, "capacity_bytes=100: the pool has"),
        ({"slots": 0}, "slots=0"),
        ({"merge": "ties"}, 'merge="ties" needs rank='),
    ):
        with pytest.raises(ValueError, match=word):
            pool.add(third, rule=change)
    with pytest.raises(PoolError, match="full"):
        pool.add(third, rule={"gate_similarity": 0.9})
    assert snapshot(tmp_path / "pool") == before
    pool.add(third, rule={"slots": 3})
    assert pool.read().rule == PoolRule(HUGE, slots=3)
    add_all(pool, tmp_path, (4,))
    with pytest.raises(ValueError, match='slots were merged by "history_mean" already'):
        pool.add(make_adapter(tmp_path / "t5", 5), rule={"merge": "opcm"})


# ---- readers beside writers ----


def test_what_is_being_read_stays_until_it_is_read(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=1)
    add_all(pool, tmp_path, (1,))
    with pool.reading("t1") as path:
        add_all(pool, tmp_path, (2,))
        assert pool.resolve("t1") != path
        assert set(deltas(path)) == set(deltas(tmp_path / "t1"))
        pool.touch("t1")
        assert path.exists()
    # Without it a folder goes at once; what is open can be read to its end.
    with open(pool.resolve("t1") / "adapter_model.safetensors", "rb") as file:
        add_all(pool, tmp_path, (3,))
        assert not path.exists()
        assert len(file.read()) == os.fstat(file.fileno()).st_size
    check_pool(tmp_path / "pool")


def test_readers_and_writers_at_once(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=2)
    add_all(pool, tmp_path, (0,))
    sources = [make_adapter(tmp_path / f"t{seed}", seed) for seed in range(1, 9)]
    faults: list[BaseException] = []
    is_done = threading.Event()

    def read() -> None:
        try:
            while not is_done.is_set():
                with AdapterPool.open(tmp_path / "pool").reading("t0") as path:
                    assert set(deltas(path)) == {"m.q", "m.v", "m.o"}
        except BaseException as error:  # noqa: BLE001 - told below
            faults.append(error)

    def write(mine: list[Path]) -> None:
        try:
            for source in mine:
                AdapterPool.open(tmp_path / "pool").add(source)
        except BaseException as error:  # noqa: BLE001 - told below
            faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(sources[half::2],)) for half in (0, 1)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    is_done.set()
    for thread in readers:
        thread.join()
    assert faults == []
    pool.touch("t0")
    assert len(check_pool(tmp_path / "pool").tasks) == 9


# ---- bad input: one line, and the pool as it was ----


def edit_config(folder: Path, **fields) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def edit_tensors(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def widen(tensors) -> None:
    name = "base_model.model.m.q.lora_B.weight"
    tensors[name] = torch.ones(7, 2)


BAD = {
    "another base": (lambda f: edit_config(f, base_model_name_or_path="org/other"), "org/other"),
    "another revision": (lambda f: edit_config(f, revision="v2"), "org/base at v2"),
    "no base": (lambda f: edit_config(f, base_model_name_or_path=None), "names? no|has no base"),
    "nan": (lambda f: edit_tensors(f, lambda t: next(iter(t.values())).fill_(math.nan)), "nan at"),
    "truncated": (truncate, "truncated"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config"),
    "dora": (lambda f: edit_config(f, use_dora=True), "DoRA"),
    "another shape": (lambda f: edit_tensors(f, widen), r"m.q is linear \(7, 9\), in the pool"),
    "no such folder": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_adapter_gets_one_line_and_leaves_the_pool_as_it_was(tmp_path, fault):
    spoil, words = BAD[fault]
    pool = make_pool(tmp_path / "pool", slots=1)
    add_all(pool, tmp_path, (1,))
    before = snapshot(tmp_path / "pool")
    bad = make_adapter(tmp_path / "bad", 2)
    spoil(bad)
    with pytest.raises((PoolError, CheckpointError, MergeError), match=words) as told:
        pool.add(bad)
    assert "\n" not in str(told.value)
    assert str(tmp_path / "bad") in str(told.value)
    assert snapshot(tmp_path / "pool") == before
    # Nor does it make a pool.
    if fault not in ("another base", "another revision", "another shape"):
        with pytest.raises(SoupkitError, match=words):
            AdapterPool.add_to(tmp_path / "new", bad, rule={"capacity_bytes": HUGE})
        assert not (tmp_path / "new").exists()


def test_a_budget_below_one_adapter_is_refused(tmp_path):
    source = make_adapter(tmp_path / "t1", 1)
    size = sum(path.stat().st_size for path in source.iterdir())
    with pytest.raises(PoolError, match=r"takes [0-9]+ bytes, the whole pool may take 1000"):
        AdapterPool.add_to(tmp_path / "pool", source, rule={"capacity_bytes": 1000})
    assert not (tmp_path / "pool").exists()
    report = AdapterPool.add_to(tmp_path / "pool", source, rule={"capacity_bytes": size + 400})
    assert size < report.slot_bytes <= size + 400
    assert report.path.is_dir()
    before = snapshot(tmp_path / "pool")
    large = make_adapter(tmp_path / "t2", 2, ranks=(6, 6))
    with pytest.raises(PoolError, match="raise the budget"):
        AdapterPool.open(tmp_path / "pool").add(large)
    assert snapshot(tmp_path / "pool") == before


def test_modules_and_shapes_are_compared_with_a_base_that_is_here(tmp_path, base_folder):
    q = "model.layers.0.self_attn.q_proj"
    good = {q: (24, 24), "model.layers.1.mlp.down_proj": (24, 44), "lm_head": (99, 24)}

    def made(name: str, shapes) -> Path:
        from soupkit.adapter_folder import Module, write_adapter
        from soupkit.factored import Pair

        modules = {
            module: Module("linear", Pair(torch.ones(2, columns), torch.ones(rows, 2), 1.0))
            for module, (rows, columns) in shapes.items()
        }
        return write_adapter(tmp_path / name, modules, base=str(base_folder))

    pool = make_pool(tmp_path / "pool")
    pool.add(made("good", good))
    before = snapshot(tmp_path / "pool")
    unknown = "model.layers.0.self_attn.z_proj"
    with pytest.raises(PoolError, match=f"its module {unknown} is unknown"):
        pool.add(made("typo", {**good, unknown: (24, 24)}))
    with pytest.raises(PoolError, match=r"up_proj changes a weight \(25, 44\).*\(44, 24\)"):
        pool.add(made("other", {"model.layers.0.mlp.up_proj": (25, 44)} | good))
    assert snapshot(tmp_path / "pool") == before


def test_a_hub_base_is_looked_at_where_there_is_a_copy(tmp_path, base_folder, monkeypatch):
    copy = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    shutil.copytree(base_folder, copy)
    refs = copy.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    pool = make_pool(tmp_path / "pool")
    source = make_adapter(tmp_path / "t1", 1, base="org/model")
    before = snapshot(tmp_path / "pool")
    with pytest.raises(PoolError, match=r"its module m\.\w is unknown: .*abc has no parameter"):
        pool.add(source)
    assert snapshot(tmp_path / "pool") == before
    # Another revision, or model, is not here.
    for number, fields in enumerate(({"revision": "v2"}, {"base_model_name_or_path": "org/m"})):
        other = AdapterPool.create(tmp_path / f"pool{number}", PoolRule(HUGE))
        other.add(edit_config(shutil.copytree(source, tmp_path / f"other{number}"), **fields))


def test_bare_parameters_that_are_numbered_otherwise_are_refused(tmp_path):
    pool = make_pool(tmp_path / "pool")
    for number, parameters in enumerate((PARAMETERS[:2], PARAMETERS[2:])):
        folder = saved(adapted(parameters=parameters, modules=["line"]), tmp_path / f"t{number}")
        edit_config(folder, base_model_name_or_path="zoo")
    pool.add(tmp_path / "t0")
    with pytest.raises(PoolError, match=r"has target_parameters \['turned"):
        pool.add(tmp_path / "t1")


def test_names_that_are_none_and_tasks_that_are_there(tmp_path):
    pool = make_pool(tmp_path / "pool")
    source = make_adapter(tmp_path / "t1", 1)
    pool.add(source)
    before = snapshot(tmp_path / "pool")
    with pytest.raises(PoolError, match="has the task 't1' already"):
        pool.add(source)
    for name in ("", "../up", "a b", "base", ".hidden"):
        with pytest.raises(ValueError, match="task '"):
            pool.add(source, task=name)
    with pytest.raises(ValueError, match="uses=0"):
        pool.touch("t1", uses=0)
    for call in (pool.resolve, pool.remove, pool.touch):
        with pytest.raises(PoolError, match="no task 'nine'; it has: t1"):
            call("nine")
    assert snapshot(tmp_path / "pool") == before
    with pytest.raises(FileExistsError):
        make_pool(tmp_path / "pool")
    with pytest.raises(PoolError, match="is no pool"):
        AdapterPool.open(tmp_path / "t1")
    assert sorted(path.name for path in source.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_damaged_slot_is_named_and_its_tasks_can_be_removed(tmp_path):
    pool = make_pool(tmp_path / "pool", slots=2)
    add_all(pool, tmp_path, (1, 2))
    twin = shutil.copytree(tmp_path / "t2", tmp_path / "twin")
    weights = pool.resolve("t2") / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = snapshot(tmp_path / "pool")
    with pytest.raises(PoolError, match=r"slot 1 is damaged: .* is not what was written.*\(t2\)"):
        pool.add(twin)
    weights.write_bytes(whole[:-1])
    before = snapshot(tmp_path / "pool")
    with pytest.raises(PoolError, match=r"slot 1 is damaged: .*truncated"):
        pool.add(twin)
    assert snapshot(tmp_path / "pool") == before
    pool.remove("t2")
    pool.add(twin)
    check_pool(tmp_path / "pool")


def spoiled(document, path, value):
    copy = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return copy


FAULTS = [
    (("schema",), 2),
    (("slots",), {}),
    (("changes",), -1),
    (("clock",), KeyError),
    (("rule", "merge"), "slerp"),
    (("rule", "merge"), []),
    (("rule", "capacity_bytes"), "many"),
    (("rule", "rank"), KeyError),
    (("base",), None),
    (("base", "name"), ""),
    (("base", "revision"), 3),
    (("tasks",), {"t1": 1}),
    (("tasks",), {}),
    (("slots", 0, "folder"), "../../t1"),
    (("slots", 0, "folder"), "slot-0.1/../../x"),
    (("slots", 0, "folder"), "slot-1.1"),
    (("slots", 0, "folder"), None),
    (("slots", 0, "number"), True),
    (("slots", 0, "digest"), "sha256:0"),
    (("slots", 0, "nbytes"), 1.5),
    (("slots", 0, "uses"), -1),
    (("slots", 0, "norms"), None),
    (("slots", 0, "rescaling"), 0),
    (("slots", 0, "history"), []),
    (("slots", 0, "history", 0, "task"), "../t1"),
    (("slots", 0, "history", 0, "score"), "high"),
    (("slots", 0, "history", 0, "lost_energy"), None),
    (("slots", 0, "history", 0, "similarity"), KeyError),
    (("slots", 0, "tasks"), []),
    (("slots", 0, "tasks"), ["t9"]),
    (("slots", 0, "tasks"), [3]),
    (("slots", 0, "extra"), 1),
]


def test_any_fault_of_pool_json_is_one_line(tmp_path):
    pool = make_pool(tmp_path / "pool")
    add_all(pool, tmp_path, (1,))
    file = tmp_path / "pool" / "pool.json"
    good = json.loads(file.read_text())
    texts = [json.dumps(spoiled(good, path, value)) for path, value in FAULTS]
    twice = json.dumps({**good, "slots": good["slots"] * 2})
    for text in (*texts, twice, "", "[]", "{", '{"schema": NaN}'):
        file.write_text(text)
        for call in (pool.read, lambda: pool.add(tmp_path / "t1"), lambda: pool.remove("t1")):
            with pytest.raises(PoolError, match=r"pool\.json") as told:
                call()
            assert "\n" not in str(told.value)
    file.write_text(json.dumps(good))
    check_pool(tmp_path / "pool")


# ---- what people do to a pool's files ----


def test_a_slot_that_somebody_removed_is_told_and_can_be_let_go(tmp_path):
    """A reader must not look for it for ever."""
    pool = make_pool(tmp_path / "pool", slots=2)
    add_all(pool, tmp_path, (1, 2))
    gone = pool.resolve("t1")
    shutil.rmtree(gone)
    for _ in range(2):  # removed, then something else in its place
        told = r"slot 0 is damaged: .*slot-0\.1 is gone; remove its"
        with pytest.raises(PoolError, match=told), pool.reading("t1"):
            raise AssertionError
        gone.write_text("")
    with pool.reading("t2") as path:
        assert deltas(path)
    assert pool.remove("t1") == ()
    add_all(pool, tmp_path, (3,))
    check_pool(tmp_path / "pool")


def test_tasks_of_a_pool_without_its_folder_of_slots_can_be_removed(tmp_path):
    pool = make_pool(tmp_path / "pool")
    add_all(pool, tmp_path, (1,))
    shutil.rmtree(tmp_path / "pool" / "slots")
    third = make_adapter(tmp_path / "t3", 3)
    with pytest.raises(PoolError, match=r"remove its tasks \(t1\) and add them again"):
        pool.add(third)
    pool.remove("t1")
    pool.add(third)
    check_pool(tmp_path / "pool")


def test_what_bears_a_slot_folders_name_is_removed_but_not_what_it_leads_to(tmp_path):
    pool = make_pool(tmp_path / "pool")
    add_all(pool, tmp_path, (1,))
    before = snapshot(tmp_path / "t1")
    (tmp_path / "pool" / "slots" / "slot-1.2").symlink_to(tmp_path / "t1")
    (tmp_path / "pool" / "slots" / "slot-2.9").write_text("a file")
    add_all(pool, tmp_path, (2,))
    check_pool(tmp_path / "pool")
    assert snapshot(tmp_path / "t1") == before


def test_processes_that_make_one_pool_at_once_all_get_in(tmp_path, monkeypatch):
    """The second finds no pool, and one there when its own is ready."""
    first, second = (make_adapter(tmp_path / f"t{seed}", seed) for seed in (1, 2))
    original = AdapterPool.add
    calls = []

    def add(self, adapter, **options):
        calls.append(self.folder.name)
        report = original(self, adapter, **options)
        if len(calls) == 1:
            AdapterPool.add_to(tmp_path / "pool", second, rule={"capacity_bytes": HUGE})
        return report

    monkeypatch.setattr(AdapterPool, "add", add)
    report = AdapterPool.add_to(tmp_path / "pool", first, rule={"capacity_bytes": HUGE})
    assert (report.slot, calls[-1]) == (1, "pool")
    assert check_pool(tmp_path / "pool").tasks == {"t2": 0, "t1": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"t1", "t2", "pool"}


def test_a_task_has_the_name_that_the_caller_gives_also_of_a_link(tmp_path, monkeypatch):
    pool = make_pool(tmp_path / "pool")
    run_folder = make_adapter(tmp_path / "checkpoint-300", 1)
    (tmp_path / "sql").symlink_to(run_folder)
    assert pool.add(tmp_path / "sql").task == "sql"
    monkeypatch.chdir(run_folder)
    assert pool.add(".").task == "checkpoint-300"


# ---- adapters that would spoil a slot ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": 1e300}, "is beyond the range of float32: correct its lora_alpha"),
        ({"dtype": torch.float64, "size": 1e60}, "is beyond the range of float32"),
    ],
)
def test_a_delta_beyond_float32_does_not_come_in(tmp_path, change, words):
    """Alone it could be stored, and every merge into its slot would fail from then on."""
    pool = make_pool(tmp_path / "pool", slots=1)
    source = make_adapter(tmp_path / "t1", 1, names=("m.q",))
    config = tmp_path / "t1" / "adapter_config.json"
    if "scale" in change:
        edit_config(source, lora_alpha=2 * change["scale"])
    else:
        tensors = load_file(source / "adapter_model.safetensors")
        tensors = {name: tensor.double() * change["size"] for name, tensor in tensors.items()}
        save_file(tensors, source / "adapter_model.safetensors")
    assert config.exists()
    before = snapshot(tmp_path / "pool")
    with pytest.raises(MergeError, match=words):
        pool.add(source)
    assert snapshot(tmp_path / "pool") == before


@pytest.mark.parametrize("name", ["m..q", "m.q[3]", "m.q[]", "m/../../q", "m.lora_q", "m.q."])
def test_a_module_that_no_merge_could_write_does_not_come_in(tmp_path, name):
    source = make_adapter(tmp_path / "t1", 1, names=("m.q",))
    tensors = load_file(source / "adapter_model.safetensors")
    tensors = {key.replace("m.q", name): tensor for key, tensor in tensors.items()}
    save_file(tensors, source / "adapter_model.safetensors")
    pool = make_pool(tmp_path / "pool")
    with pytest.raises(CheckpointError, match="names no module that a base can have"):
        pool.add(source)


def test_another_number_of_experts_is_another_base(tmp_path):
    from soupkit.adapter_folder import Module, write_adapter
    from soupkit.factored import Pair

    def made(name: str, count: int) -> Path:
        kind = "expert" if count else "linear"
        names = [f"mlp.experts[{i}]" for i in range(count)] or ["mlp.experts"]
        pair = Pair(torch.ones(2, 5), torch.ones(4, 2), 1.0)
        carried = {"target_parameters": ["mlp.experts.up"]} if count else {}
        modules = {one: Module(kind, pair) for one in names}
        return write_adapter(tmp_path / name, modules, base="moe", carried=carried)

    for first, other in ((3, 4), (3, 0), (0, 1)):
        pool = make_pool(tmp_path / f"pool{first}{other}", slots=1)
        pool.add(made(f"a{first}{other}", first))
        before = snapshot(pool.folder)
        with pytest.raises(PoolError, match=f"has {other} experts, in the pool {first}"):
            pool.add(made(f"b{first}{other}", other))
        assert snapshot(pool.folder) == before
    pair = Pair(torch.ones(2, 5), torch.ones(4, 2), 1.0)
    both = {"up": Module("linear", pair), "up[0]": Module("expert", pair)}
    with pytest.raises(ValueError, match="'up' is given both as a module and as experts"):
        write_adapter(tmp_path / "both", both, base="moe", carried={"target_parameters": ["up"]})


@pytest.mark.parametrize("base", ["x/" * 5000, "~nobody-of-that-name/base", "a\0b", "x\ny"])
def test_a_bases_name_may_be_any_text(tmp_path, base):
    pool = make_pool(tmp_path / "pool")
    for seed in (1, 2):
        edit_config(make_adapter(tmp_path / f"t{seed}", seed), base_model_name_or_path=base)
        pool.add(tmp_path / f"t{seed}")
    with pytest.raises(PoolError, match="give it a pool of its own"):
        pool.add(make_adapter(tmp_path / "t3", 3))


# ---- the command line ----


def run(*words, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["pool", *map(str, words)])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def test_the_commands(tmp_path):
    for seed in (1, 2, 3):
        make_adapter(tmp_path / f"t{seed}", seed)
    pool = tmp_path / "pool"
    assert "--budget-bytes" in run("add", pool, tmp_path / "t1", code=2)
    told = json.loads(
        run("add", pool, tmp_path / "t1", "--budget-bytes", "1MB", "--slots", 2, "--json")
    )
    assert (told["task"], told["action"], told["slot"]) == ("t1", "store", 0)
    assert Path(told["path"]).is_dir()
    text = run("add", pool, tmp_path / "t2", "--task", "two")
    assert text.startswith("two: stored, slot 1 serves two")
    text = run("add", pool, tmp_path / "t3", "--rank", 2)
    assert "t3: merged, slot" in text
    assert "of the merged delta's energy" in text
    assert AdapterPool.open(pool).read().rule == PoolRule(1_000_000, slots=2, rank=2)
    listed = json.loads(run("list", pool, "--json"))
    assert listed["tasks"].keys() == {"t1", "two", "t3"}
    assert {"kind", "rule", "base", "bytes", "slots"} <= listed.keys()
    table = run("list", pool)
    for word in ("base org/base", "of 1.0 MB", "t1", "two", "t3"):
        assert word in table
    path = Path(json.loads(run("resolve", pool, "t3", "--json"))["path"])
    assert path.is_absolute()
    assert (path / "adapter_config.json").is_file()
    assert run("resolve", pool, "t3") == f"{path}\n"
    done = CliRunner().invoke(app, ["inspect", str(pool), "--json"])
    assert json.loads(done.stdout) == listed
    assert "t3" in CliRunner().invoke(app, ["inspect", str(pool)]).stdout
    shared = next(slot["tasks"] for slot in listed["slots"] if "t3" in slot["tasks"])
    left = json.loads(run("remove", pool, "t3", "--json"))["left"]
    assert [*left, "t3"] == shared
    assert f"{left[0]} is removed\n" in run("remove", pool, left[0])
    line = run("resolve", pool, "t3", code=1)
    assert line == f"soupkit: the pool has no task 't3'; it has: {', '.join(pool_tasks(pool))}\n"
    assert run("add", pool, tmp_path / "none", code=1).count("\n") == 1
    nobody = "~nobody-of-that-name/pool"
    assert run("list", nobody, code=1).endswith("`soupkit pool add` makes one\n")
    assert run("add", pool, nobody, code=1).startswith(f"soupkit: {nobody}: no such folder")
    run("add", pool, tmp_path / "t3", "--merge", "slerp", code=2)


def pool_tasks(pool: Path) -> list[str]:
    return list(AdapterPool.open(pool).tasks)


def test_evicted_tasks_are_told(tmp_path):
    for seed in (1, 2):
        make_adapter(tmp_path / f"t{seed}", seed)
    options = ["--slots", 1, "--gate-similarity", 0.9, "--when-full", "evict"]
    run("add", tmp_path / "pool", tmp_path / "t1", "--budget-bytes", 10**6, *options)
    assert "no longer in the pool: t1" in run("add", tmp_path / "pool", tmp_path / "t2")
    assert replace(PoolRule(10**6)) != AdapterPool.open(tmp_path / "pool").read().rule
