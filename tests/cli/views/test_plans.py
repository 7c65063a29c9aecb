"""Deployments as they look: in 80 columns, with and without a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from disagg.cli.views.plans import plan_view, question, reports_view, rotation_view
from disagg.cli.views.progress import DeployProgress
from disagg.errors import CommandFailed, DeployRefused
from disagg.fleet.deploy.deployment import DeployResult
from disagg.fleet.deploy.steps import Plan, Step, StepProgress
from disagg.fleet.services.base import RunScript
from tests.values import printed

HASH = "0123456789abcdef"


def steps(*names: str) -> tuple[Step, ...]:
    return tuple(Step(name, f"do {name}", RunScript("", ())) for name in names)


REPORTS = [
    DeployResult(
        "dgx-spark-1", "changed", Plan("dgx-spark-1", HASH, steps("release", "switch"), needs="restart"), 1.5, 2048
    ),
    DeployResult("dgx-spark-2", "unchanged", Plan("dgx-spark-2", HASH, needs="")),
    DeployResult("mac-studio-1", "planned", Plan("mac-studio-1", HASH, steps("token"), notes=("mind [this]",))),
    DeployResult(
        "mac-studio-2",
        "failed",
        Plan("mac-studio-2", HASH, steps("environment")),
        error=CommandFailed("mac-studio-2: exit code 1:\nno index [here]\nin step 1 of 1: do environment", "fix it"),
    ),
]


def shown(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    text = printed(console)
    assert all(len(line) <= width for line in text.splitlines())
    return text


def test_the_end_is_one_row_per_host_then_failures_then_what_to_do() -> None:
    text = shown(reports_view(REPORTS))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith(("dgx", "mac"))}
    assert rows["dgx-spark-1"] == ["changed", "01234567", "2", "2.0", "KiB", "1.50", "s"]
    assert rows["dgx-spark-2"][:2] == ["unchanged", "01234567"]
    assert rows["mac-studio-2"][0] == "failed"
    assert text.index("no index [here]") < text.index("hint: fix it") < text.index("1 changed, 1 unchanged")
    assert "1 failed" in text
    assert text.rstrip().endswith("next: disagg restart --host dgx-spark-1")


def test_hosts_are_not_listed_where_the_whole_fleet_needs_the_same() -> None:
    assert shown(reports_view(REPORTS[:1], all_hosts=["dgx-spark-1"])).rstrip().endswith("next: disagg restart")
    one_of_two = shown(reports_view(REPORTS[:1], all_hosts=["dgx-spark-1", "dgx-spark-2"]))
    assert one_of_two.rstrip().endswith("next: disagg restart --host dgx-spark-1"), "the others are not to restart"


def test_a_model_that_is_not_carried_is_to_be_pulled_before_the_start() -> None:
    names = ["a", "b"]
    new = [DeployResult(name, "changed", Plan(name, HASH, steps("release"), needs="start")) for name in names]
    assert "next: disagg start\n" in shown(reports_view(new, names))
    assert "next: disagg models pull && disagg start\n" in shown(reports_view(new, names, pulling=names))
    assert "next: disagg models pull --host b && disagg start\n" in shown(reports_view(new, names, pulling=["b"]))
    assert "pull" not in shown(reports_view(REPORTS[:1], names, pulling=["dgx-spark-1"])), "it serves already"


def test_hosts_with_the_same_fault_are_shown_once() -> None:
    names = ["a", "b", "c"]
    failed = [
        DeployResult(name, "failed", error=DeployRefused(f"{name}: nothing there", f"disagg deploy --host {name}"))
        for name in names[:2]
    ]
    for view in (plan_view, reports_view):
        text = shown(view(failed, names))
        assert "error: a, b: nothing there\n hint: disagg deploy --host a --host b\n" in text
        assert text.count("error:") == 1
    assert " hint: disagg deploy\n" in shown(reports_view(failed, names[:2]))


def test_uninstalling_has_words_of_its_own() -> None:
    text = shown(reports_view(REPORTS[:2], words={"changed": "removed", "unchanged": "nothing there"}))
    assert "1 removed, 1 nothing there" in text and "changed" not in text


def test_one_step_is_not_called_steps() -> None:
    assert "  1 step  release" in shown(plan_view([DeployResult("h", "planned", Plan("h", HASH, steps("token")))]))


def test_a_plan_shows_each_hosts_steps_and_notes() -> None:
    text = shown(plan_view(REPORTS))
    assert "dgx-spark-1  2 steps  release 0123456789abcdef" in text and " 1 do release" in text
    assert "dgx-spark-2  unchanged" in text
    assert "! mind [this]" in text
    assert "mac-studio-2  cannot be deployed" in text


def test_a_step_that_needs_two_lines_stays_under_itself() -> None:
    long = Step("release", f"send {'one word ' * 12}", RunScript("", ()))
    plan = Plan("h", HASH, (long,), notes=("note " * 20,))
    lines = shown(plan_view([DeployResult("h", "planned", plan)])).splitlines()
    assert lines[1].startswith("   1 send one") and lines[2].startswith("     word")
    assert lines[3].startswith("   ! note") and lines[4].startswith("     note") and max(map(len, lines)) <= 80


def test_the_question_states_how_many_hosts_and_how_much_they_download() -> None:
    new = DeployResult("a", "planned", Plan("a", HASH, steps("environment", "switch"), package_bytes=2_900_000_000))
    same = DeployResult("b", "planned", Plan("b", HASH, steps("switch"), package_bytes=2_900_000_000))
    assert question("Deploy", [new, same], 4) == "Deploy on 2 of 4 hosts (they download 2.7 GiB of packages)?"
    assert question("Deploy", [new], 1) == "Deploy on 1 of 1 host (it downloads 2.7 GiB of packages)?"
    assert question("Deploy", [same], 4) == "Deploy on 1 of 4 hosts?"


def test_a_refusal_is_shown_with_its_remedy() -> None:
    refused = DeployResult(
        "h", "failed", Plan("h", ""), error=DeployRefused("h: there is no Python", "brew install python")
    )
    for view in (plan_view([refused]), reports_view([refused])):
        text = shown(view)
        assert "there is no Python" in text and "brew install python" in text


def test_without_a_terminal_there_is_one_line_per_step_and_none_per_line_of_output() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    with DeployProgress(console) as progress:
        progress.report(StepProgress("h", 1, 2, "send [bold]release"))
        progress.report(StepProgress("h", 1, 2, "send [bold]release", "12 %"))
        progress.report(StepProgress("h", 2, 2, "switch to the new release, which is a long story"))
    assert printed(console).splitlines() == [
        "h: [1/2] send [bold]release",
        "h: [2/2] switch to the new release, which is a long story",
    ]


def test_on_a_terminal_there_is_one_row_per_host_with_the_last_line_of_output() -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    with DeployProgress(console) as progress:
        progress.report(StepProgress("a", 1, 9, "build the environment"))
        progress.report(StepProgress("a", 1, 9, "build the environment", "Collecting \x1b[2Jtorch " + "x" * 80))
        progress.report(StepProgress("b", 9, 9, "tidy"))
        text = shown(progress, 60)
    first, second = text.splitlines()
    assert " a 1/9 build the environment  Collecting" in first and "\x1b" not in first
    assert " b 9/9 tidy" in second
    assert max(map(len, text.splitlines())) + len("^C") < 60, "an interruption shows on the last line"


DOWN = "its server does not run, and nobody has stopped it: `disagg restart` has not ended there"


def test_a_host_that_is_down_though_nobody_has_stopped_it_is_told_before_what_is_next() -> None:
    one = Plan("a", HASH, needs="start", down=DOWN)
    reports = [DeployResult("a", "changed", one), DeployResult("b", "changed", Plan("b", HASH, needs="restart"))]
    text = " ".join(shown(reports_view(reports, ["a", "b"])).split())
    assert f"down: a: {DOWN} → disagg start --host a next: disagg restart --host b" in text
    assert f"! {DOWN}: disagg start --host a" in " ".join(shown(plan_view([DeployResult("a", "planned", one)])).split())


def test_a_release_from_before_tls_is_left_by_a_restart_of_all_at_once() -> None:
    reports = [DeployResult("a", "changed", Plan("a", HASH, needs="restart", at_once=True))]
    assert shown(reports_view(reports, ["a"])).rstrip().endswith("next: disagg restart --all-at-once")


def test_an_unfinished_rotation_has_its_command() -> None:
    assert shown(rotation_view()).endswith("→ disagg token rotate\n")
