"""Draw docs/fleet.svg: a terminal in which the test bed's four hosts are deployed, started and shown.

    python -m tests.surveys.picture_fleet docs/fleet.svg

Run it as root from the repository's root, with the project's environment. It creates the test bed of tests/testbed
(four sshds in network namespaces, at the addresses of hosts.toml), runs the commands against it, draws their output,
and removes the test bed. Takes about a minute.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.integration.deployed import Operator, operator
from tests.testbed.bed import running

WIDTH = 80
CUT = "dgx-spark-2"
BED = """\
# the test bed: four hosts behind sshds of their own, in network namespaces of
# one machine; models of 1.7 million parameters, on its CPUs"""


def main() -> None:
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor")
    console.print(Text(BED, "dim"))
    with tempfile.TemporaryDirectory(prefix="disagg-bed-") as folder, running(Path(folder)) as bed:
        bed.need_links()
        with bed.entered():
            own = Path(folder) / "operator"
            own.mkdir()
            fleet = operator(bed, own)
            try:
                _show(console, fleet, "deploy", "--yes")
                _show(console, fleet, "start")
                with bed.cut(CUT):
                    console.print(Text(f"# the cable of {CUT} is pulled", "dim"))
                    _show(console, fleet, "status", code=4)
            finally:
                fleet.run("stop", "--all")
    console.save_svg(sys.argv[1], title="disagg, on its test bed")


def _show(console: Console, fleet: Operator, *arguments: str, code: int = 0) -> None:
    """Print a command line and what it wrote to stdout, with its colours."""
    print("disagg", *arguments, file=sys.stderr)
    environment = {name: value for name, value in fleet.environment.items() if name != "NO_COLOR"}
    environment |= {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    done = subprocess.run(fleet.argv(*arguments), env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != code:
        sys.exit(f"disagg {' '.join(arguments)} exited with {done.returncode}, not {code}:\n{done.stdout}")
    console.print(Text.assemble(("$ ", "bold green"), ("disagg " + " ".join(arguments), "bold")))
    console.print(Text.from_ansi(done.stdout))


if __name__ == "__main__":
    main()
