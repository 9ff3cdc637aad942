"""The parameters that take part, the soup folder on disk, the base, and what is refused by name."""

import copy
import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from soup_runs import assert_equal_weights, load, saved_base, tiny_llama, weights_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from soupkit import ExportConfig, SoupConfig
from soupkit.errors import TrainingError
from soupkit.training import Soup
from soupkit.training.merging import cost_of, rounds
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.snapshot import Snapshot, write_tensors
from soupkit.training.state import BaseRecord, Partner, SoupFolder, SoupState
from soupkit.training.weights import ModelTensors, unwrap

UNGATED = SoupConfig(merge_every_n_steps=1, rank=2, gate="none", feed_back=True)


@pytest.fixture
def one_rank():
    """A process group of one, for wrappers that need one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state_at(step: int, partner: int | None = None) -> SoupState:
    found = None if partner is None else Partner(partner, 0.5)
    return SoupState(
        step=step,
        base=BaseRecord("base", None, "sha256:0"),
        weights="w",
        dtypes="float32",
        partner=found,
    )


def test_tied_parameters_count_once_under_their_files_name():
    """TB58."""
    store = ParamStore(tiny_llama(tied=True))
    assert "model.embed_tokens.weight" in store.names
    assert "lm_head.weight" not in store.names
    assert "lm_head.weight" in ParamStore(tiny_llama(tied=False)).names


def test_names_are_those_of_the_file_under_any_wrapper(one_rank):
    """TB78."""
    model = tiny_llama()
    plain = ParamStore(model).names
    wrapped = DistributedDataParallel(torch.compile(DistributedDataParallel(model)))
    assert ParamStore(wrapped).names == plain
    assert ModelTensors(wrapped).names == ModelTensors(model).names
    assert unwrap(wrapped) is model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_checksum_sees_every_bit(dtype):
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(1, 1, bias=False)).to(dtype)
    store = ParamStore(model)
    before = store.checksum()
    weight = model[0].weight.detach().view(-1)
    bits = weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    for place in (0, 5, len(bits) - 1):
        bits[place] ^= 1
        assert store.checksum() != before
        bits[place] ^= 1
    rows = model[0].weight.detach()
    rows[[0, 1]] = rows[[1, 0]].clone()
    assert store.checksum() != before


def test_a_write_of_another_dtype_or_shape_is_refused():
    store = ParamStore(nn.Linear(2, 3).to(torch.bfloat16))
    with pytest.raises(ValueError, match="float32"):
        store.write("weight", torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        store.write("weight", torch.zeros(1, 2, dtype=torch.bfloat16))


@settings(deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20),
    world_size=st.integers(1, 5),
)
def test_rounds_share_out_every_parameter_once_and_evenly(shapes, world_size):
    costs = {f"p{i}": cost_of(f"p{i}", shape) for i, shape in enumerate(shapes)}
    dealt = rounds(costs, world_size)
    assert sorted(name for names in dealt for name in names) == sorted(costs)
    order = [costs[name] for names in dealt for name in names]
    assert order == sorted(order, reverse=True)
    assert all(len(names) == world_size for names in dealt[:-1])


def refuse(model: nn.Module, match: str) -> None:
    with pytest.raises(TrainingError, match=match):
        ParamStore(model)


def test_what_is_not_supported_is_refused_by_name(one_rank):
    """TB01: a sharded weight is never averaged as if it were whole."""
    with torch.device("meta"):
        refuse(nn.Linear(2, 2), r"meta device.*device_map")
    held = nn.Linear(2, 2)
    held.weight.ds_id = 3
    refuse(held, "ZeRO")

    class Params4bit(nn.Parameter):
        pass

    quantised = nn.Linear(2, 2)
    quantised.weight = Params4bit(torch.zeros(2, 2))
    refuse(quantised, "quantised")

    class DeepSpeedEngine(nn.Module):
        pass

    class PipelineEngine(DeepSpeedEngine):
        pass

    refuse(PipelineEngine(), "pipeline")
    frozen = nn.Linear(2, 2).requires_grad_(False)
    refuse(frozen, "no parameter takes part")


def test_launched_processes_without_a_group_are_refused(monkeypatch):
    """distributed.md 2.4: they would train models of their own, and write one folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="no process group"):
        Ranks.current()


@settings(deadline=None)
@given(
    step=st.integers(0, 10**7),
    score=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    parts=st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple)).map(
        tuple
    ),
)
def test_a_state_comes_back_as_it_was(step, score, parts):
    state = SoupState(
        step=step,
        base=BaseRecord(None, "main", "sha256:1"),
        weights="x",
        dtypes="bfloat16 + float32",
        partner=Partner(step, score, parts=parts),
        metric_seen=True,
        refused_in_a_row=2,
        history=({"step": 1, "accepted": True},),
    )
    text = json.dumps(state.to_json(), allow_nan=False)
    assert SoupState.from_json(json.loads(text)) == state


def test_a_state_from_before_scores_had_parts_is_read():
    value = state_at(5, partner=3).to_json()
    del value["partner"]["parts"]
    assert SoupState.from_json(value) == state_at(5, partner=3)


def test_the_newest_state_at_or_before_a_step_is_used(tmp_path):
    folder = SoupFolder(tmp_path / "soup")
    for step in (0, 9, 10, 100):
        folder.write_state(state_at(step))
    assert folder.newest(at_most=99).step == 10
    assert folder.newest(at_most=100).step == 100
    assert sorted(path.name for path in folder.root.glob("state-*"))[-1] == "state-00000100.json"
    assert folder.forget_after(9) == [10, 100]
    assert folder.steps() == [0, 9]


def test_a_damaged_state_names_its_file(tmp_path):
    folder = SoupFolder(tmp_path)
    folder.write_state(state_at(3))
    for text in ("{", "[]", '{"schema": 2}', '{"schema": 1, "step": 3}'):
        folder.state_path(3).write_text(text)
        with pytest.raises(TrainingError, match=r"state-00000003\.json"):
            folder.newest(at_most=5)


@settings(deadline=None, max_examples=30)
@given(
    steps=st.sets(st.integers(0, 30), min_size=1),
    checkpoints=st.sets(st.integers(0, 30)),
)
def test_cleaning_keeps_what_any_checkpoint_would_resume_from(tmp_path_factory, steps, checkpoints):
    folder = SoupFolder(tmp_path_factory.mktemp("soup"))
    for step in steps:
        folder.partner_path(step).touch()
        folder.write_state(state_at(step, partner=step))
    expected = {step: folder.newest(at_most=step) for step in checkpoints | {max(steps)}}
    folder.clean(checkpoints)
    for step, state in expected.items():
        assert folder.newest(at_most=step) == state
        assert state is None or folder.partner_path(state.partner.step).exists()
    assert len(folder.steps()) <= len(checkpoints) + 1
    assert len(list(folder.root.glob("partner-*"))) == len(folder.steps())


def test_a_snapshot_is_the_weights_bit_for_bit(tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().float())
    store = ParamStore(model)
    write_tensors(tmp_path / "a.safetensors", store, durable=True)
    saved = Snapshot(tmp_path / "a.safetensors")
    assert saved.names == store.names
    for name in store.names:
        assert saved.dtype(name) == store.dtype(name)
        assert torch.equal(saved.tensor(name), store.read(name))
    with pytest.raises(TrainingError, match="absent"):
        Snapshot(tmp_path / "absent.safetensors")


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, ParamStore(nn.Linear(2, 2)), durable=True)
    before = path.read_bytes()

    class Failing(ParamStore):
        def tensor(self, name):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_tensors(path, Failing(nn.Linear(2, 2)), durable=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


def run(model, folder, steps=4, resume=None, base=None, config=UNGATED):
    """SGD on a fixed gradient: cheap and the same in every life."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    soup = Soup(model, optimizer=optimizer, config=config, output_dir=folder, base=base)
    if resume is not None:
        soup.resume(resume)
    for step in range(soup.num_steps, steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        soup.step()
    return soup


def test_the_base_is_the_folder_the_model_came_from_or_its_step_0_weights(tmp_path):
    base = saved_base(tmp_path / "base")
    run(load(base), tmp_path / "same")
    assert not (tmp_path / "same" / "soup" / "base").exists()
    changed = load(base)
    with torch.no_grad():
        changed.model.norm.weight[0] += 1e-6
    start = weights_of(changed)
    run(changed, tmp_path / "changed")
    assert_equal_weights(start, weights_of(load(tmp_path / "changed" / "soup" / "base")))
    # bfloat16 weights of a float32 folder are other weights.
    run(load(base, dtype=torch.bfloat16), tmp_path / "bf16", steps=0).finish()
    assert (tmp_path / "bf16" / "soup" / "base").exists()


def test_weights_that_are_not_those_of_the_named_base_are_told(tmp_path, capfd):
    base = saved_base(tmp_path / "base")
    run(load(base), tmp_path / "same", steps=0, base=base).finish()
    assert "differ" not in capfd.readouterr().err
    rounded = load(base, dtype=torch.bfloat16)
    run(rounded, tmp_path / "rounded", steps=0, base=base).finish()
    pairs = [
        (value.double(), weights_of(rounded)[name].double())
        for name, value in weights_of(load(base)).items()
    ]
    squares = [sum(float((a - b).square().sum()) for a, b in pairs)]
    squares.append(sum(float(a.square().sum()) for a, _ in pairs))
    said = f"differ by {(squares[0] / squares[1]) ** 0.5:.2%} of their norm"
    assert said in capfd.readouterr().err


def test_a_folder_that_another_living_run_uses_is_refused(tmp_path):
    """They would merge with each other's captured weights."""
    base = saved_base(tmp_path / "base")
    run(load(base), tmp_path / "run", steps=2)
    kept = sorted(path.name for path in (tmp_path / "run" / "soup").iterdir())
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run(load(base), tmp_path / "run", steps=2)
        except TrainingError as error:
            os.write(theirs, str(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    assert "in use by another run" in os.read(ours, 1000).decode()
    os.close(ours)
    assert sorted(path.name for path in (tmp_path / "run" / "soup").iterdir()) == kept


def test_a_disk_without_room_for_a_merge_is_refused_before_step_1(tmp_path, monkeypatch):
    """TB65."""
    few = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: few)
    with pytest.raises(TrainingError, match="GB free"):
        run(load(saved_base(tmp_path / "base")), tmp_path / "run")


def test_a_new_run_in_an_old_folder_starts_afresh(tmp_path, capfd):
    base = saved_base(tmp_path / "base")
    run(load(base), tmp_path / "run", steps=4)
    capfd.readouterr()
    second = run(load(base), tmp_path / "run", steps=2)
    assert "up to step 4 is deleted" in capfd.readouterr().err
    assert [report.step for report in second.reports] == [2]


def test_a_resume_needs_a_base_that_is_known(tmp_path):
    base = saved_base(tmp_path / "base")
    with pytest.raises(TrainingError, match="base="):
        run(load(base), tmp_path / "run", resume=2)
    first = run(load(base), tmp_path / "run", resume=2, base=base)
    assert [report.step for report in first.reports] == [4]
    other = saved_base(tmp_path / "other", seed=7)
    with pytest.raises(TrainingError, match="other weights"):
        run(first._preparation.store.model, tmp_path / "run", resume=4, base=other)


def test_a_resume_with_other_parameters_is_refused(tmp_path):
    base = saved_base(tmp_path / "base")
    config = SoupConfig(
        merge_every_n_steps=1, rank=2, gate="none", include=("mlp",), feed_back=True
    )
    model = load(base)
    run(model, tmp_path / "run", config=config)
    with pytest.raises(TrainingError, match="include="):
        run(model, tmp_path / "run", resume=5)


def test_resume_comes_before_the_first_step(tmp_path):
    soup = run(load(saved_base(tmp_path / "base")), tmp_path / "run", steps=1)
    with pytest.raises(TrainingError, match="before the first step"):
        soup.resume(1)


def test_a_plain_loop_resumes_bit_for_bit_and_keeps_what_its_checkpoints_need(tmp_path):
    base = saved_base(tmp_path / "base")
    whole = load(base)
    run(whole, tmp_path / "whole", steps=7)
    model = load(base)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    soup = Soup(model, optimizer=optimizer, config=UNGATED, output_dir=tmp_path / "run")

    def go_on(until):
        while soup.num_steps < until:
            generator = torch.Generator().manual_seed(soup.num_steps)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
            soup.step()

    go_on(3)
    saved = weights_of(model), copy.deepcopy(optimizer.state_dict())
    soup.save(tmp_path / "mine" / "3")
    go_on(6)
    soup.save(tmp_path / "mine" / "6")
    assert [path.name for path in sorted((tmp_path / "run" / "soup").glob("state-*"))] == [
        "state-00000003.json",
        "state-00000006.json",
    ]
    soup.finish()

    model = load(base)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    soup = Soup(model, optimizer=optimizer, config=UNGATED, output_dir=tmp_path / "run")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    soup.load(tmp_path / "mine" / "3")
    go_on(7)
    assert_equal_weights(weights_of(whole), weights_of(model))


def overwritten(base, other):
    (base / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())


def replaced(base, other):
    os.replace(other / "model.safetensors", base / "model.safetensors")


def removed(base, other):
    shutil.rmtree(base)


@pytest.mark.parametrize("change", [overwritten, replaced, removed])
def test_a_base_that_changes_during_the_run_is_noticed(tmp_path, change):
    """TB63: no merge, no export and no resume against other weights of the same shapes."""
    base = saved_base(tmp_path / "base")
    model = load(base)
    soup = run(model, tmp_path / "run", steps=2)
    change(base, saved_base(tmp_path / "other", seed=9))
    before = weights_of(model)
    report = soup.step()
    assert not report.accepted
    assert "base" in report.reason
    assert_equal_weights(before, weights_of(model))
    with pytest.raises(TrainingError, match="base"):
        soup.finish(export=ExportConfig(family=tmp_path / "family", name="x"))
    assert not (tmp_path / "family").exists()
    with pytest.raises(TrainingError, match="base"):
        run(model, tmp_path / "run", resume=3)
