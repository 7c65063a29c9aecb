"""The results of `disagg verify`: the comparisons, the controls, what the figures mean, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.api.verify import HostsReport, PairReport, RunComparison, SplitComparison, VerifyBounds, VerifyReport
from disagg.cli.views.items import plain_table
from disagg.config import MIN_TOLERANCE
from disagg.units import size
from disagg.verify.compare import audit_tolerance

_FINDING_STYLE = {"ok": "green", "patched": "yellow", "refused": "red"}


def verify_view(report: VerifyReport) -> RenderableType:
    """The table and the lines under it."""
    table = _table("max |Δlogit|")
    expected = report.same_weights
    table.add_row("hand-off ↔ prefill alone", *_row(report.handoff_vs_prefill, expected))
    table.add_row("hand-off ↔ decode alone", *_row(report.handoff_vs_decode, expected))
    table.add_row("prefill ↔ decode, alone", *_row(report.prefill_vs_decode, expected))
    table.add_row("prefill alone, twice", *_row(report.prefill_again, expected))
    table.add_row("decode alone, twice", *_row(report.decode_again, expected))
    _add_splits(table, report.splits, ("prefill alone", "decode alone"), expected)
    sizes = f"{report.prompt_tokens} prompt tokens, {report.max_tokens} generated"
    title = Text.assemble((report.architecture, "bold"), f"  {sizes}, {report.distinct_tokens} distinct")
    ends = Text(f"prefill {report.prefill}: {report.prefill_weights}   decode {report.decode}: {report.decode_weights}")
    found = [*_findings(report), _control(report), *_audit(report.deviation)]
    below = [*found, *_splits(report), _bounds(report.bounds, "|Δlogit|"), Text(report.summary)]
    return Group(title, ends, Text(), table, Text(), *below, _verdict(report))


def hosts_view(report: HostsReport) -> RenderableType:
    """One table for each pair of hosts."""
    sizes = f"{report.prompts} prompts of up to {report.prompt_tokens} tokens, {report.max_tokens} generated after each"
    title = Text.assemble((report.model, "bold"), f"  {sizes}, {report.distinct_tokens} distinct")
    return Group(title, *(_pair(pair) for pair in report.pairs))


def _pair(pair: PairReport) -> RenderableType:
    head = Text.assemble("\n", (f"{pair.prefill} → {pair.decode}", "bold"))
    if pair.bounds is None:
        return Group(head, Text(f"✘ {pair.why}", "bold red"))
    if pair.kv_wire:
        head.append(f"  KV {pair.kv_wire}, {size(pair.kv_bytes)}")
    table = _table("max |Δlogp|")
    names = (f"hand-off ↔ {pair.prefill}", f"hand-off ↔ {pair.decode}", f"{pair.prefill} ↔ {pair.decode}, alone")
    for name, found in zip(
        names, (pair.handoff_vs_prefill, pair.handoff_vs_decode, pair.prefill_vs_decode), strict=True
    ):
        if found is not None:
            table.add_row(name, *_row(found, pair.bounds.max_logit_diff is not None))
    _add_splits(table, pair.splits, (pair.prefill, pair.decode), pair.bounds.max_logit_diff is not None)
    verdict = Text("✔ same answers", "bold green") if pair.ok else Text(f"✘ {pair.why}", "bold red")
    return Group(head, table, *_audit(pair.deviation), *_splits(pair), _bounds(pair.bounds, "|Δlogp|"), verdict)


def _add_splits(table: Table, splits: Sequence[SplitComparison], ends: tuple[str, str], equal_expected: bool) -> None:
    """Two rows for each split: compared with one end, and with the other."""
    for one in splits:
        for end, found in zip(ends, (one.vs_prefill, one.vs_decode), strict=True):
            if found is not None:
                table.add_row(f"split after layer {one.layers} ↔ {end}", *_row(found, equal_expected))


def _splits(report: VerifyReport | PairReport) -> list[Text]:
    """Which splits are wrong, and why; or why there are none."""
    if report.split_refusal:
        return [Text(f"no split: {report.split_refusal}", "yellow")]
    return [Text(f"✘ split after layer {one.layers}: {one.why}", "red") for one in report.splits if not one.ok]


def _table(difference: str) -> Table:
    figures = ("tokens", "differs at", difference, "mean KL", "top-1")
    return plain_table("compared", *figures, right=figures, bold=["compared"], fold=["compared"])


def _row(comparison: RunComparison, equal_expected: bool) -> list[RenderableType]:
    first = comparison.first_divergence
    style = "green" if first is None else "red" if equal_expected else ""
    return [
        Text(f"{comparison.equal_tokens} equal", style),
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


def _audit(deviation: float | None) -> list[Text]:
    """What audits found of this KV, and the setting that bounds later KV by it."""
    if deviation is None:
        return []
    setting = f"engine.kv_audit_tolerance = {audit_tolerance(deviation):g}"
    bound = f"{100 * deviation:.2g} % of the bound; four times that, {MIN_TOLERANCE} at least"
    found = Text(f"audit: the KV differs by {bound}: {setting}")
    found.stylize("" if deviation <= 1 else "yellow")
    return [found]


def _bounds(bounds: VerifyBounds, difference: str) -> Text:
    """difference: the name of the quantity that the table has."""
    most = bounds.max_logit_diff
    tokens = "" if most is None else f"all tokens equal, {difference} at most {most:.0e}, "
    return Text(
        f"bounds of the hand-off: {tokens}mean KL at most {bounds.max_kl:.1e}, top-1 at least {bounds.min_top1:.1%}"
    )


def _verdict(report: VerifyReport) -> Text:
    if report.same_weights:
        return Text("✔ same answer", "bold green") if report.ok else Text("✘ not the same answer", "bold red")
    if report.ok:
        return Text("✔ the hand-off is as close to either engine as their weights are to each other", "bold green")
    return Text("✘ the hand-off differs by more than the forms of the weights explain", "bold red")
