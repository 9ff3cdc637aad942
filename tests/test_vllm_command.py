"""How vLLM is started for a family, and which vLLM and settings are refused; without vLLM."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from serving_kit import make_family
from typer.testing import CliRunner

from soupkit.cli import app
from soupkit.errors import ServingError
from soupkit.serving import vllm_plugin
from soupkit.serving.vllm import command as command_module
from soupkit.serving.vllm.command import Command, command, slot_bytes
from soupkit.serving.vllm.limits import TESTED, check_config, check_version
from soupkit.serving.vllm.settings import Settings, settings


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"), names=("linear", "rich"))


def value(found: Command, flag: str) -> str:
    return found.arguments[found.arguments.index(flag) + 1]


def test_each_flag_reaches_vllm(root: Path) -> None:
    found = command(
        root / "family", host="0.0.0.0", port=8001, dtype="bfloat16", pin=("rich",),
        host_cache_bytes=5000, max_running=7, keys=("secret",), tensor_parallel=8,
    )  # fmt: skip
    expected = {
        "--model": str(root / "base"),
        "--served-model-name": "base",
        "--host": "0.0.0.0",
        "--port": "8001",
        "--dtype": "bfloat16",
        # Beside one for each pin: a slot for each variant.
        "--max-loras": "1",
        "--max-num-seqs": "7",
        "--tensor-parallel-size": "8",
    }
    assert {flag: value(found, flag) for flag in expected} == expected
    assert {"--enable-lora", "--enforce-eager"} <= set(found.arguments)
    assert "secret" not in found.arguments
    assert found.environment == {
        "SOUPKIT_FAMILY": str(root / "family"),
        "SOUPKIT_PIN": "rich",
        "SOUPKIT_HOST_CACHE_BYTES": "5000",
        "VLLM_API_KEY": "secret",
    }
    plain = command(root / "family")
    assert value(plain, "--max-loras") == "2"
    assert value(plain, "--dtype") == ("bfloat16" if torch.cuda.is_available() else "float32")
    assert "--max-num-seqs" not in plain.arguments


def test_a_budget_of_device_memory_is_so_many_slots(root: Path) -> None:
    from soupkit.bundle import open_family, open_variant

    family = open_family(root / "family")
    manifests = [open_variant(family.folder(name)).manifest for name in family.variants]
    one = slot_bytes(manifests, torch.float32)
    assert value(command(root / "family", cache_bytes=one), "--max-loras") == "1"
    assert value(command(root / "family", cache_bytes=2 * one), "--max-loras") == "2"
    assert value(command(root / "family", cache_bytes=9 * one), "--max-loras") == "2"
    halves = command(root / "family", cache_bytes=one, tensor_parallel=2)
    assert value(halves, "--max-loras") == "2"
    with pytest.raises(ServingError, match="too small for a slot"):
        command(root / "family", cache_bytes=one - 1)


def test_a_family_whose_variant_has_the_bases_name_still_serves_the_base(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=("linear",))
    named = root / "linear"
    (root / "base").rename(named)
    found = command(root / "family", base=named)
    assert value(found, "--model") == str(named)
    assert value(found, "--served-model-name") == "base"


def test_wrong_arguments_are_told(root: Path) -> None:
    with pytest.raises(ValueError, match="--port 0"):
        command(root / "family", port=0)
    with pytest.raises(ValueError, match="2 keys, vLLM takes one"):
        command(root / "family", keys=("a", "b"))
    with pytest.raises(ServingError, match="--pin nobody: there is no such variant, only linear"):
        command(root / "family", pin=("nobody",))


def test_the_command_line_becomes_vllms_server(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    monkeypatch.setattr(command_module, "find_spec", lambda name: name)
    key = tmp_path / "key"
    key.write_text("secret\n")
    result = CliRunner().invoke(
        app, ["serve", str(root / "family"), "--engine", "vllm", "--api-key-file", str(key),
              "--tensor-parallel", "2"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    program, arguments, environment = became[0]
    assert program == sys.executable
    assert arguments[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert environment["VLLM_API_KEY"] == "secret"
    assert "secret" not in result.output
    assert "--tensor-parallel-size 2" in result.stderr


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--device", "cpu"),
        ("--pool", "pool"),
        ("--auto-pin", "2"),
        ("--max-queue", "5"),
        ("--max-wait", "3"),
        ("--admin-key-file", "keys"),
        ("--replicas", "2"),
    ],
)
def test_flags_that_vllm_has_nothing_for_are_refused_by_name(
    root: Path, option: str, given: str
) -> None:
    arguments = ["serve", str(root / "family"), "--engine", "vllm", option, given]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert f"{option} does not go with --engine vllm: " in result.stderr


def test_without_vllm_the_remedy_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "find_spec", lambda name: None)
    with pytest.raises(ServingError, match=r'pip install "soupkit\[vllm\]"'):
        command_module.run(command(root / "family"))


def test_the_plug_in_is_what_vllm_looks_for() -> None:
    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "soupkit"]
    assert found.load() is vllm_plugin.register


def test_what_vllm_loads_needs_neither_our_engine_nor_transformers() -> None:
    """vLLM pins an older transformers than our engine reaches into."""
    rooms = ("bank", "batch", "command", "copies", "limits", "metrics", "places", "settings")
    rooms += ("parent", "sites", "store", "tally")
    code = f"""
import importlib, sys
for room in {rooms}:
    importlib.import_module("soupkit.serving.vllm." + room)
print([m for m in ("transformers", "soupkit.serving.engine", "vllm") if m in sys.modules])
"""
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"


def test_without_a_family_the_plug_in_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOUPKIT_FAMILY", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it would fail
    vllm_plugin.register()
    assert settings({}) is None
    assert settings({"SOUPKIT_FAMILY": ""}) is None


def test_another_vllm_is_refused_and_told_which_one_is_wanted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = ModuleType("vllm")
    stranger.__version__ = "0.33.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stranger)
    monkeypatch.setenv("SOUPKIT_FAMILY", str(root / "family"))
    with pytest.raises(ServingError, match=r"vLLM 0\.33\.1 cannot serve.*vllm==0\.32\.\*"):
        vllm_plugin.register()
    minor = ".".join(map(str, TESTED))
    for version in (f"{minor}.0", f"{minor}.4", f"{minor}.0+cpu", f"{minor}.1.dev3+g1"):
        check_version(version)
    for version in ("0.31.9", "0.3.2", "1.32.0", "0.320.0", "dev", ""):
        with pytest.raises(ServingError):
            check_version(version)


def test_settings_are_read_and_wrong_ones_told(tmp_path: Path) -> None:
    found = settings(
        {
            "SOUPKIT_FAMILY": str(tmp_path),
            "SOUPKIT_PIN": "a,b",
            "SOUPKIT_HOST_CACHE_BYTES": "7",
            "SOUPKIT_STORE": "/dev/shm",
            "SOUPKIT_RUNTIME_LOADS": "1",
        }
    )
    assert found == Settings(tmp_path, ("a", "b"), 7, Path("/dev/shm"), True)
    assert settings({"SOUPKIT_FAMILY": str(tmp_path)}) == Settings(tmp_path)
    for wrong in ({"SOUPKIT_HOST_CACHE_BYTES": "7GB"}, {"SOUPKIT_RUNTIME_LOADS": "yes"}):
        with pytest.raises(ServingError, match=next(iter(wrong))):
            settings({"SOUPKIT_FAMILY": "x", **wrong})


def config(**changes: Any) -> Any:
    """A VllmConfig under which variants are served, as far as it is read."""
    model = {
        "use_mla": False,
        "runner_type": "generate",
        "head_dtype": None,
        "dtype": torch.float32,
        "enable_prompt_embeds": False,
        "enable_sleep_mode": False,
        "enable_cumem_allocator": False,
    }
    parallel = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "enable_dbo": False,
        "ubatch_size": 0,
    }
    uva, prefetch = {"cpu_offload_gb": 0}, {"offload_group_size": 0}
    cache = {"kv_sharing_fast_prefill": False}
    compilation = {"mode": 0, "cudagraph_mode": SimpleNamespace(value=0)}
    own: dict[str, Any] = {"use_v2_model_runner": False, "speculative_config": None}
    own |= {"weight_transfer_config": None, "kv_transfer_config": None}
    for key, given in changes.items():
        for part in (model, parallel, compilation, uva, prefetch, cache, own):
            if key in part:
                part[key] = given
    return SimpleNamespace(
        **own,
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(**compilation),
        cache_config=SimpleNamespace(**cache),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(**uva), prefetch=SimpleNamespace(**prefetch)
        ),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"mode": 3}, "--enforce-eager"),
        ({"cudagraph_mode": SimpleNamespace(value=2)}, "--enforce-eager"),
        ({"speculative_config": object()}, "speculative"),
        ({"use_mla": True}, "latent attention"),
        ({"runner_type": "pooling"}, "--runner generate"),
        ({"pipeline_parallel_size": 2}, "--tensor-parallel-size"),
        ({"data_parallel_size": 2}, "side by side"),
        ({"head_dtype": torch.float64}, "another dtype"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
        ({"enable_cumem_allocator": True}, "--enable-cumem-allocator"),
        ({"weight_transfer_config": object()}, "--weight-transfer-config"),
        ({"cpu_offload_gb": 3}, "--cpu-offload-gb"),
        ({"offload_group_size": 2}, "--offload-group-size"),
        ({"kv_transfer_config": object()}, "tokens alone.*--kv-offloading-size"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"enable_dbo": True}, "--enable-dbo"),
        ({"ubatch_size": 2}, "--ubatch-size"),
        ({"prefill_context_parallel_size": 2}, "share a context"),
        ({"decode_context_parallel_size": 2}, "share a context"),
    ],
)
def test_settings_under_which_variants_would_answer_wrongly_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    check_config(config())
    with pytest.raises(ServingError, match=message):
        check_config(config(**changes))
