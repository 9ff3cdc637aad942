"""The house of CONTRIBUTING.md: who may import whom, read from the source text."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "soupkit").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))

# Layer of every module of soupkit: an import may only go to the same layer or a lower one.
LAYER = {
    "version": 0,
    "errors": 1, "exits": 1, "config": 1, "delta": 1, "svd": 1, "merge": 1, "lora": 1,
    "numeric": 1, "mean": 1, "solvers": 1, "monosoup": 1, "opcm": 1, "cuts": 1,
    "factored": 1, "gauge": 1,
    "encoding": 1, "signs": 1, "refit": 1, "gram": 1, "checks": 1, "forms": 1, "paired": 1,
    "allocate": 1, "candidates": 1, "workers": 1, "window": 1, "alike": 1, "lora_kinds": 1,
    "kmerge": 1, "slot_merge": 1, "placement": 1,
    "headroom": 1, "node": 1, "node_times": 1, "node_plan": 1, "design_figures": 1,
    "pool": 2, "pool_manifest": 2, "pool_admission": 2, "pool_slots": 2, "pool_place": 2,
    "pool_folders": 2,
    "checkpoint": 2, "files": 2, "bundle": 2, "adapters": 2, "export": 2, "restore": 2,
    "offline": 2, "verify": 2, "tracking": 2, "tensorfile": 2, "fingerprint": 2, "companions": 2,
    "shards": 2, "manifest": 2, "blocks": 2, "family": 2, "family_write": 2, "describe": 2,
    "dense": 2, "pairs": 2, "rewrite": 2, "bitdelta_file": 2, "merge_config": 2,
    "budget": 2, "merger": 2, "opcm_merger": 2, "survey": 2, "stored": 2, "partial": 2,
    "streaming": 2,
    "adapter_config": 2, "adapter_folder": 2, "adapter_layout": 2, "adapter_write": 2,
    "adapter_variant": 2, "name_patterns": 2,
    "training": 3, "serving": 3, "distill": 3,
    "quality": 3, "exact_match": 3, "report": 3, "report_figures": 3, "report_page": 3,
    "bench": 4, "cli": 4, "__main__": 4,
}  # fmt: skip

# Packages that only the named files may import, and not at all in L1.
ONLY_IN = {
    "transformers": {
        "soupkit/exact_match.py",
        "soupkit/quality.py",
        "soupkit/training/trainer.py",
        "soupkit/training/pool_callback.py",
        "soupkit/bench/strategy.py",
        "soupkit/serving/engine.py",
        "soupkit/serving/pretrained.py",
        "soupkit/distill/streamed.py",
    },
    "accelerate": {"soupkit/training/accelerate.py"},
    "peft": set(),
    "deepspeed": {"soupkit/bench/strategy.py"},
    "matplotlib": {"soupkit/report_page.py", "soupkit/tracking.py"},
    "fastapi": {"soupkit/serving/app.py"},
    "ray": {"soupkit/serving/ray_app.py", "soupkit/serving/ray_fleet.py"},
    "uvicorn": {"soupkit/serving/listening.py"},
    "prometheus_client": {
        "soupkit/serving/metrics.py",
        "soupkit/serving/fleet_metrics.py",
        "soupkit/serving/vllm/metrics.py",
    },
    "vllm": {
        "soupkit/serving/vllm_plugin.py",
        *(f"soupkit/serving/vllm/{room}.py" for room in ("hooks", "model", "models", "worker")),
    },
    "triton": {
        "kernels/soupkit_kernels/triton_linear.py",
        "kernels/soupkit_kernels/triton_weights.py",
        "soupkit/bench/sass.py",
    },
    "yaml": {"soupkit/merge_config.py"},
    "typer": {
        f"soupkit/cli/{room}.py"
        for room in (
            "app",
            "models",
            "families",
            "running",
            "tuning",
            "quality",
            "pool",
            "planning",
        )
    },
}
L1_MAY_IMPORT = {"torch", "numpy", "soupkit", "soupkit_kernels"}


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module of a file as (dotted name, whether the import runs at module level)."""
    tree = ast.parse(path.read_text())
    top_level = set(map(id, tree.body))
    package = module_name(path).rsplit(".", 1)[0]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [f"{package}.{node.module}" if node.module else package]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            # `from soupkit import merge` imports the module soupkit.merge.
            names = [node.module] if node.module != "soupkit" else [
                f"soupkit.{alias.name}" for alias in node.names
            ]  # fmt: skip
        else:
            continue
        found += [(name, id(node) in top_level) for name in names]
    return found


def module_name(path: Path) -> str:
    relative = path.relative_to(ROOT / "kernels" if "kernels" in path.parts else ROOT)
    return ".".join(relative.with_suffix("").parts)


def layer_of(dotted: str) -> int | None:
    parts = dotted.split(".")
    if parts[0] != "soupkit" or len(parts) < 2:
        return None
    return LAYER.get(parts[1])


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_imports_only_run_downwards(path: Path) -> None:
    own = layer_of(module_name(path))
    if label(path).startswith("kernels/"):
        assert not [name for name, _ in imports(path) if name.split(".")[0] == "soupkit"]
        return
    if path.name == "__init__.py" and path.parent == ROOT / "soupkit":
        return
    assert own is not None, f"give soupkit.{path.stem} a layer in tests/test_layout.py"
    for name, _ in imports(path):
        target = layer_of(name)
        if target is not None:
            assert target <= own, f"{label(path)} (L{own}) imports {name} (L{target})"
    siblings = {"training": "serving", "serving": "training"}
    room = module_name(path).split(".")[1]
    if room in siblings:
        assert not [n for n, _ in imports(path) if n.startswith(f"soupkit.{siblings[room]}")]
    if room == "serving":
        assert not [n for n, _ in imports(path) if n in ("soupkit.merge", "soupkit.svd")]
    if own == 1:
        stray = {n.split(".")[0] for n, _ in imports(path)} - L1_MAY_IMPORT
        assert stray <= set(sys.stdlib_module_names), f"{label(path)} imports {stray}"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_optional_packages_are_imported_only_where_they_belong(path: Path) -> None:
    for name, _ in imports(path):
        allowed = ONLY_IN.get(name.split(".")[0])
        assert allowed is None or label(path) in allowed, f"{label(path)} imports {name}"


def test_the_modules_of_a_layer_import_each_other_without_a_cycle() -> None:
    graph = {
        module_name(path): {name for name, _ in imports(path) if name.startswith("soupkit.")}
        for path in SOURCES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"a cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for target in graph.get(module, ()):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_kernels_is_a_source_root_and_never_a_package() -> None:
    # With an __init__.py it would shadow the PyPI package `kernels` that transformers imports.
    for folder in ("kernels", "tests", "recipes"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_import_soupkit_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "accelerate", "triton", "deepspeed", "fastapi", "tensorboard")
    code = f"import sys, soupkit; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr


def test_no_room_has_outgrown_one_sitting() -> None:
    long = {label(p): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 350}
    assert not long
