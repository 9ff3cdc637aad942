"""Run by .ci/run inside a venv that holds only the built wheel: it must work without the clone.

Usage: check_wheel.py FAMILY CLONE, where FAMILY is the family that `make demo` left.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def soupkit(*args: str) -> str:
    done = subprocess.run(["soupkit", *args], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"soupkit {' '.join(args)} exited {done.returncode}: {done.stderr}")
    return done.stdout


def main(family: Path, clone: Path) -> None:
    import soupkit as package

    if clone in Path(package.__file__).parents:
        sys.exit("soupkit was imported from the clone, not from the wheel")
    files = importlib.metadata.files("soupkit") or []
    top = {file.parts[0] for file in files if not file.parts[0].startswith((".", "soupkit-"))}
    if top != {"soupkit", "soupkit_kernels"}:
        sys.exit(f"the wheel installs {sorted(top)}; only soupkit and soupkit_kernels belong in it")
    if importlib.util.find_spec("soupkit_kernels") is None:
        sys.exit("soupkit_kernels is missing from the wheel")

    soupkit("--help")
    soupkit("verify", str(family))
    names = list(json.loads((family / "family.json").read_text())["variants"])
    with tempfile.TemporaryDirectory() as folder:
        soupkit("restore", str(family), names[0], "--out", f"{folder}/dense")
        if not (Path(folder) / "dense" / "model.safetensors").exists():
            sys.exit("restore wrote no model.safetensors")
    print(f"the wheel works: verified {len(names)} variants, restored {names[0]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
