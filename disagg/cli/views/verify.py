"""The result of `disagg verify`: three comparisons, the controls, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_COMPARISONS = {
    "handoff_vs_prefill": "hand-off ↔ prefill alone",
    "handoff_vs_decode": "hand-off ↔ decode alone",
    "prefill_vs_decode": "prefill ↔ decode, alone",
}
_FINDING_STYLE = {"ok": "green", "patched": "yellow", "refused": "red"}


def verify_view(result: Mapping[str, Any]) -> RenderableType:
    """The table and the lines under it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("compared", overflow="fold", style="bold")
    for name in ("tokens", "differs at", "max |Δlogit|", "mean KL", "top-1"):
        table.add_column(name, justify="right")
    for key, label in _COMPARISONS.items():
        table.add_row(label, *_row(result[key]))
    size = f"{result['prompt_tokens']} prompt tokens, {result['max_tokens']} generated"
    title = Text.assemble((str(result["architecture"]), "bold"), f"  {size}, {result['distinct_tokens']} distinct")
    return Group(title, Text(), table, Text(), *_findings(result), _control(result), _verdict(result))


def _row(comparison: Mapping[str, Any]) -> list[RenderableType]:
    equal, first = comparison["equal_tokens"], comparison["first_divergence"]
    top1 = comparison["top1"]
    return [
        _equal(equal, first),
        "–" if first is None else str(first),
        _small(comparison["max_logit_diff"]),
        _small(comparison["mean_kl"]),
        "–" if top1 is None else f"{top1:.2%}",
    ]


def _equal(equal: Any, first: Any) -> Text:
    """`equal` is a count or a truth value."""
    style = "green" if first is None else "red"
    if isinstance(equal, bool):
        return Text("equal" if equal else "differ", style)
    return Text(f"{equal} equal", style)


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _findings(result: Mapping[str, Any]) -> list[RenderableType]:
    """What the preflight patched or refused; one line where all is well."""
    findings = result["preflight"]
    notable = [finding for finding in findings if finding["status"] != "ok"]
    if not notable:
        return [Text.assemble("preflight: ", (f"{len(findings)} components agree", "green"))]
    return [
        Text.assemble(
            f"preflight: {finding['component']} ",
            (finding["status"], _FINDING_STYLE.get(finding["status"], "")),
            f" {finding['detail']}" if finding.get("detail") else "",
        )
        for finding in notable
    ]


def _control(result: Mapping[str, Any]) -> Text:
    if result["wrong_kv_changes_output"] is None:
        return Text("no control: a prompt of one token needs no KV", "yellow")
    if result["wrong_kv_changes_output"]:
        return Text.assemble("control: ", ("a wrong KV cache changes the answer", "green"), ", so KV is really used")
    return Text.assemble("control: ", ("a wrong KV cache changes nothing: this run proves nothing", "bold red"))


def _verdict(result: Mapping[str, Any]) -> Text:
    return Text("✔ same answer", "bold green") if result["ok"] else Text("✘ not the same answer", "bold red")
