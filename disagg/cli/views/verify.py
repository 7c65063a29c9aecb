"""The result of `disagg verify`: three comparisons, the controls, and the verdict."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.api.verify import RunComparison, VerifyReport

_FINDING_STYLE = {"ok": "green", "patched": "yellow", "refused": "red"}


def verify_view(report: VerifyReport) -> RenderableType:
    """The table and the lines under it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("compared", overflow="fold", style="bold")
    for name in ("tokens", "differs at", "max |Δlogit|", "mean KL", "top-1"):
        table.add_column(name, justify="right")
    table.add_row("hand-off ↔ prefill alone", *_row(report.handoff_vs_prefill))
    table.add_row("hand-off ↔ decode alone", *_row(report.handoff_vs_decode))
    table.add_row("prefill ↔ decode, alone", *_row(report.prefill_vs_decode))
    size = f"{report.prompt_tokens} prompt tokens, {report.max_tokens} generated"
    title = Text.assemble((report.architecture, "bold"), f"  {size}, {report.distinct_tokens} distinct")
    return Group(title, Text(), table, Text(), *_findings(report), _control(report), _verdict(report))


def _row(comparison: RunComparison) -> list[RenderableType]:
    first = comparison.first_divergence
    return [
        Text(f"{comparison.equal_tokens} equal", "green" if first is None else "red"),
        "–" if first is None else str(first),
        f"{comparison.max_logit_diff:.1e}",
        f"{comparison.mean_kl:.1e}",
        f"{comparison.top1:.2%}",
    ]


def _findings(report: VerifyReport) -> list[RenderableType]:
    """What the preflight patched or refused; one line if all components agree."""
    notable = [finding for finding in report.preflight if finding.status != "ok"]
    if not notable:
        return [Text.assemble("preflight: ", (f"{len(report.preflight)} components agree", "green"))]
    return [
        Text.assemble(
            f"preflight: {finding.component} ",
            (finding.status, _FINDING_STYLE[finding.status]),
            f" {finding.detail}" if finding.detail else "",
        )
        for finding in notable
    ]


def _control(report: VerifyReport) -> Text:
    if report.wrong_kv_changes_output is None:
        return Text("no control: a prompt of one token needs no KV", "yellow")
    if report.wrong_kv_changes_output:
        return Text.assemble("control: ", ("a wrong KV cache changes the answer", "green"), ", so the KV is used")
    return Text.assemble("control: ", ("a wrong KV cache changes nothing: this run proves nothing", "bold red"))


def _verdict(report: VerifyReport) -> Text:
    return Text("✔ same answer", "bold green") if report.ok else Text("✘ not the same answer", "bold red")
