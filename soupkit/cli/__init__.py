"""The command `soupkit`: parses, calls, prints.

Results go to stdout (one JSON document with --json), progress and complaints to stderr. Exit codes:
0 done, 1 the check failed or the input was bad, 2 usage. Heavy modules are imported inside the
command that needs them.
"""

# Importing a module registers its commands, in the order that --help shows.
from soupkit.cli import models as models  # isort: skip
from soupkit.cli import families as families  # isort: skip
from soupkit.cli import tuning as tuning  # isort: skip
from soupkit.cli import quality as quality  # isort: skip
from soupkit.cli import pool as pool  # isort: skip
from soupkit.cli import planning as planning  # isort: skip
from soupkit.cli import running as running  # isort: skip
from soupkit.cli.app import app
from soupkit.cli.console import prepare_process


def main() -> None:
    """Entry point of the `soupkit` command."""
    prepare_process()
    app()
