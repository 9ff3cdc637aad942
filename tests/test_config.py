"""Settings check themselves and name what is wrong."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from soupkit.config import ExportConfig, Method, RunMethod, SoupConfig, check_variant_name


def test_defaults_are_those_of_the_readme() -> None:
    config = SoupConfig()
    assert (config.merge_every_n_steps, config.start_after_step) == (1000, 0)
    assert (config.method, config.rank, config.energy) == ("svd_mean", 64, None)
    assert (config.weight, config.feed_back, config.gate) == (0.5, False, "metric")
    assert (config.gate_batches, config.metric_for_best) == (8, "eval_loss")
    assert (config.greater_is_better, config.optimizer_state, config.seed) == (False, "keep", 0)
    assert (config.ema_decay, config.ema_every_n_steps, config.ema_place) == (0.999, 1, "device")
    assert config.undo == "disk"


@pytest.mark.parametrize("method", get_args(RunMethod))
def test_training_sees_no_merge_unless_told_and_ends_with_the_better(method: RunMethod) -> None:
    config = SoupConfig(method=method)
    assert config.feed_back is False
    assert config.loads_at_end
    assert not SoupConfig(method=method, load_at_end=False).loads_at_end


def test_a_run_that_is_fed_its_merges_ends_with_its_own_weights() -> None:
    fed = dataclasses.replace(SoupConfig(), feed_back=True)
    assert not fed.loads_at_end
    with pytest.raises(ValueError, match="leave load_at_end out"):
        SoupConfig(feed_back=True, load_at_end=True)


def test_tb24_feeding_an_ema_back_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r'leave feed_back out.*method="mean"'):
        SoupConfig(method="ema", feed_back=True)


@pytest.mark.parametrize(
    "change",
    [{"rank": 64}, {"energy": 0.9}, {"weight": 0.3}, {"optimizer_state": "reset"}],
    ids=str,
)
def test_what_an_ema_would_ignore_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f'{next(iter(change))}=.*method="ema": leave it out'):
        SoupConfig(method="ema", **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize(
    "change", [{"ema_decay": 0.9}, {"ema_every_n_steps": 2}, {"ema_place": "host"}], ids=str
)
def test_tb24_what_only_an_ema_uses_is_refused_elsewhere(
    method: Method, change: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=f'{next(iter(change))}=.*or use method="ema"'):
        SoupConfig(method=method, **change)  # type: ignore[arg-type]
    assert SoupConfig(method="ema", **change)  # type: ignore[arg-type]


def test_energy_alone_takes_the_place_of_the_rank() -> None:
    assert SoupConfig(energy=0.95).rank is None
    assert SoupConfig(rank=8).energy is None
    assert SoupConfig(method="monosoup").rank is None
    assert SoupConfig(method="monosoup", energy=0.8).energy == 0.8
    assert SoupConfig(method="mean").rank is None


def test_settings_are_frozen_and_can_be_replaced() -> None:
    config = SoupConfig(include=["attn"])  # type: ignore[arg-type]
    assert config.include == ("attn",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 3  # type: ignore[misc]
    assert dataclasses.replace(config, merge_every_n_steps=5).rank == 64
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("merge_every_n_steps", 0, "merge_every_n_steps=0: must be >= 1"),
        ("merge_every_n_steps", 2.5, "whole number"),
        ("merge_every_n_steps", True, "whole number"),
        ("start_after_step", -1, ">= 0"),
        ("stop_after_step", 0, ">= 1"),
        ("method", "median", "'svd_mean', 'monosoup', 'mean', 'ema'"),
        ("rank", 0, "rank=0: must be >= 1"),
        ("rank", "8", "whole number"),
        ("energy", 0.0, "0 < value <= 1"),
        ("energy", 1.1, "0 < value <= 1"),
        ("energy", float("nan"), "finite"),
        ("weight", 0.0, "0 < value < 1"),
        ("weight", 1.0, "0 < value < 1"),
        ("weight", float("inf"), "finite"),
        ("gate", "maybe", "'metric', 'none'"),
        ("gate_batches", 0, ">= 1"),
        ("metric_for_best", "", "eval_loss"),
        ("optimizer_state", "zero", "'keep', 'reset'"),
        ("feed_back", "yes", "True, False"),
        ("greater_is_better", None, "True, False"),
        ("ema_decay", 0.0, "0 < value < 1"),
        ("ema_decay", 1.0, "0 < value < 1"),
        ("ema_decay", float("nan"), "finite"),
        ("ema_every_n_steps", 0, ">= 1"),
        ("ema_every_n_steps", 1.5, "whole number"),
        ("ema_place", "cpu", "'device', 'host', 'disk'"),
        ("undo", "host", "'disk', 'memory'"),
        ("seed", -1, ">= 0"),
        ("include", "attn", "tuple of regular expressions"),
        ("exclude", ("(",), "no regular expression"),
        ("include", (b"attn",), "no regular expression"),
    ],
)
def test_every_field_refuses_with_value_and_limit(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        SoupConfig(**{field: value})  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [("mean", "rank", 8), ("mean", "energy", 0.9), ("monosoup", "rank", 8)],
)
def test_a_method_refuses_what_it_would_not_look_at(method: str, field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}={value} has no meaning .*svd_mean"):
        SoupConfig(method=method, **{field: value})  # type: ignore[arg-type]


def test_rank_and_energy_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="one of the two"):
        SoupConfig(rank=8, energy=0.9)


@pytest.mark.parametrize("name", ["coder", "a", "0", "A.b_c-1", "x" * 128])
def test_good_variant_names(name: str) -> None:
    assert check_variant_name(name) == name
    assert ExportConfig(family="family", name=name).name == name


@pytest.mark.parametrize(
    "name",
    ["", "base", ".hidden", "-x", "_x", "a/b", "a\\b", "..", "a b", "a\n", "ä", "x" * 129, 3, None],
)
def test_bad_variant_names(name: str) -> None:
    with pytest.raises(ValueError, match="choose another name"):
        check_variant_name(name)
    with pytest.raises(ValueError, match="choose another name"):
        ExportConfig(family="family", name=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoding": "col"}, "encoding 'col': use row"),
        ({"encoding": "row-x5"}, "encoding 'row-x5': use row"),
        ({"encoding": None}, "encoding None: use row"),
        ({"family": ""}, "family"),
        ({"budget_bytes": 9}, "budget_bytes=9 goes with encoding=\"auto\", not with 'row'"),
        ({"encoding": "auto", "budget_bytes": -1}, "budget_bytes=-1"),
        ({"encoding": "auto", "budget_bytes": 2**63}, "budget_bytes="),
        ({"encoding": "auto", "budget_bytes": 1.5}, "budget_bytes=1.5"),
    ],
)
def test_export_settings_refuse(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportConfig(**{"family": Path("family"), "name": "coder", **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("budget_bytes", [None, 0, 2**63 - 1])
def test_an_export_within_a_budget_is_a_setting(budget_bytes: int | None) -> None:
    config = ExportConfig("family", "coder", encoding="auto", budget_bytes=budget_bytes)
    assert config.budget_bytes == budget_bytes


def test_importing_soupkit_loads_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "transformers", "triton", "deepspeed", "accelerate")
    code = f"import sys, soupkit; sys.exit(' '.join({set(heavy)} & sys.modules.keys()) or 0)"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
