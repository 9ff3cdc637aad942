"""A family behind Ray Serve: two replicas, loaded, one of them killed.

Ray brings half a gigabyte of its own, so it runs from a venv of its own, which `make ray` makes;
the test is skipped without it.
"""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from serving_kit import VARIANTS, Oracle, make_family

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("SOUPKIT_RAY", ROOT / ".ray")) / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs ray: `make ray`")
def test_a_family_behind_ray_survives_a_replica(tmp_path: Path) -> None:
    root, out = make_family(tmp_path / "served"), tmp_path / "out.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [ROOT, ROOT / "kernels", ROOT / "tests"]
    done = subprocess.run(
        [PYTHON, ROOT / "tests" / "ray_runs.py", root / "family", str(port), out],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, names = json.loads(out.read_text()), sorted(VARIANTS)
    # Cold ones went to one replica each, the hot one has two.
    assert sorted(name for there in found["cold"] for name in there) == names
    assert sum(names[0] in there for there in found["hot"]) == 2
    # The stream that the killed replica had begun says so; all else is answered, and rightly.
    assert json.loads(found["long"])["error"]["code"] == "replica_lost"
    oracle = Oracle(root)
    expected = {(n, p): oracle(n, p, 16) for n in names for p in ("hello", "a", "b")}
    assert len(found["answers"]) == len(names) + 60 + 80
    for answer in found["answers"]:
        assert answer["status"] == 200, answer
        text = expected[answer["model"], answer["prompt"]]
        if answer["end"] in ("whole", "[DONE]"):
            assert answer["text"] == text
        else:
            assert json.loads(answer["end"])["error"]["code"] == "replica_lost"
            assert answer["events"]
            assert text.startswith(answer["text"])
    assert found["replicas"] == 2
    assert found["models"] == ["base", *names]
    assert found["missing"] == 404
