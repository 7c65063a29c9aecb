"""What a plan changes, in 80 columns."""

from __future__ import annotations

import io

from rich.console import Console, Group

from disagg.cli.views.plans import MAX_LINES, difference_lines, plan_view
from disagg.fleet.deploy.compare import Difference, FileChange, PackageChange
from disagg.fleet.deploy.deployment import DeployResult
from disagg.fleet.deploy.steps import Plan
from tests.values import printed


def shown(found: Difference) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(Group(*difference_lines(found)))
    text = printed(console)
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def test_settings_files_packages_and_bytes_are_shown() -> None:
    found = Difference(
        {"disagg/a.py": "changed", "disagg/b.py": "added", "disagg/c.py": "changed"},
        ("--- hosts.toml (current)", "+++ hosts.toml (new)", "@@ -1 +1 @@", "-max_batch = 16", "+max_batch = [8]"),
        (PackageChange("new", "", "1"), PackageChange("gone", "2", ""), PackageChange("torch", "2.12", "2.13")),
        3 << 20,
        5 << 30,
    )
    assert shown(found) == (
        "   ~ settings\n"
        "     --- hosts.toml (current)\n"
        "     +++ hosts.toml (new)\n"
        "     @@ -1 +1 @@\n"
        "     -max_batch = 16\n"
        "     +max_batch = [8]\n"
        "   ~ files  1 added, 2 changed: disagg/a.py, disagg/b.py, disagg/c.py\n"
        "   ~ packages  1 added, 1 changed, 1 removed: +new 1, -gone 2, torch 2.12 ->\n"
        "     2.13\n"
        "   ~ bytes  3.0 MiB to send, before compression, 5.0 GiB to download at most\n"
    )


def test_a_host_that_gets_its_first_release_has_bytes_only() -> None:
    assert shown(Difference(to_send=512)) == "   ~ bytes  512 B to send, before compression\n"


def test_long_lists_are_cut_and_say_so() -> None:
    files: dict[str, FileChange] = {f"disagg/{number}.py": "changed" for number in range(9)}
    found = Difference(files, ("+line",) * (MAX_LINES + 3))
    text = shown(found)
    assert "9 changed: " in text and " and 3 more\n" in text and "     and 3 more lines: --json\n" in text


def test_a_host_cannot_drive_the_terminal_with_its_settings() -> None:
    assert "\x1b" not in shown(Difference({"disagg/\x1b[2J": "removed"}, ("-\x1b[2J",)))


def test_a_plan_shows_it_below_the_steps_and_json_has_all() -> None:
    report = DeployResult("h", "planned", Plan("h", "0" * 16), difference=Difference({"a": "added"}, ("+x",), (), 1, 2))
    console = Console(file=io.StringIO(), width=80)
    console.print(plan_view([report]))
    assert printed(console).index("h  unchanged") < printed(console).index("~ settings")
    assert report.to_json()["difference"] == {
        "files": {"a": "added"},
        "settings": ["+x"],
        "packages": [],
        "to_send": 1,
        "to_download": 2,
    }
