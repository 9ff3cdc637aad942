"""What recipes/serve hands to systemd and to a container engine, against what the server has."""

import json
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from soupkit.cli import app
from soupkit.serving.listening import DRAIN_SECONDS, LAST_SECONDS

SERVE = Path(__file__).parents[1] / "recipes" / "serve"


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit, by name."""
    found: dict[str, list[str]] = {}
    text = (SERVE / "soupkit.service").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def flags_of_serve() -> set[str]:
    told = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    return set(re.findall(r"--[a-z-]+", told))


def test_the_unit_starts_the_server_with_flags_that_it_has() -> None:
    [command] = unit()["ExecStart"]
    program, *arguments = shlex.split(command)
    assert program.endswith("/soupkit")
    assert arguments[0] == "serve"
    flags = {argument for argument in arguments if argument.startswith("--")}
    assert flags
    assert flags <= flags_of_serve()
    # Keys are credentials that systemd hands over by the names that the command reads.
    given = {value.partition(":")[0] for value in unit()["LoadCredential"]}
    assert given == set(re.findall(r"\$\{CREDENTIALS_DIRECTORY\}/(\S+)", command))


def test_systemd_waits_for_what_is_open() -> None:
    assert unit()["KillMode"] == ["mixed"]
    # With replicas twice: they end, then the front does.
    assert int(unit()["TimeoutStopSec"][0]) > 2 * (DRAIN_SECONDS + LAST_SECONDS)


def test_the_container_starts_the_server_with_flags_that_it_has() -> None:
    text = (SERVE / "Containerfile").read_text()
    entry = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)[0])
    assert entry[:2] == ["soupkit", "serve"]
    assert {word for word in entry if word.startswith("--")} <= flags_of_serve()
    for sources in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (SERVE.parents[1] / source).exists(), source
