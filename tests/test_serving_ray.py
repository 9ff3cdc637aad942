"""A family behind Ray Serve: routes, two replicas, loaded and killed, what an administrator does.

Ray brings half a gigabyte of its own, so it runs from a venv of its own, which `make ray` makes;
the test is skipped without it.
"""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serving_kit import VARIANTS, Oracle, make_family

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("SOUPKIT_RAY", ROOT / ".ray")) / "bin" / "python"


REFUSED = (
    "family= is missing; give family=, base=", "keys= is unknown; give",
    "replicas=two: needs a whole number", "num_gpus=-1.0: must be",
    "replicas=0: must be", "max_wait_seconds=long: needs a number", "nowhere is no family",
    "pin=none: there is no such variant, only", "api_key_file='nowhere' cannot be read",
)  # fmt: skip


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
    assert found["models"] == ["base", *names]
    assert found["differ"] == []
    for words, said in zip(REFUSED, found["refused"], strict=True):
        assert words in said
    check_metrics(found["metrics"], names)
    check_admin(found["admin"], *names[:2])


def check_metrics(metrics: dict[str, float], names: list[str]) -> None:
    for replica in "01":
        assert metrics[f"soupkit_replica_up,{replica}"] == 1
        for name in names:
            assert f"soupkit_variant_resident_bytes,{name},{replica}" in metrics
    assert sum(metrics[f"soupkit_replica_restarts_total,{i}"] for i in "01") >= 1
    assert metrics["soupkit_front_lost_streams_total"] >= 1
    assert metrics["soupkit_front_retries_total"] >= 1


def check_admin(told: dict[str, Any], gone: str, stays: str) -> None:
    status, body = told["unloaded"]
    assert (status, body["object"], body["id"]) == (200, "variant.unloaded", gone)
    assert body["freed_bytes"]["device"] > 0
    assert (told["again"][0], told["again"][1]["error"]["code"]) == (404, "model_not_found")
    status, body = told["pin"]
    assert (status, body["id"], body["phase"], body["pinned"]) == (200, stays, "resident", True)
    # All replicas are others by now.
    assert told["hidden"] == [404] * 5
    assert gone not in told["listed"]
    assert told["pinned"]
    assert told["loaded"][0] == 200
    assert told["shown"] == [200] * 4
    assert told["last"][0] == 200
