"""`disagg rollout`: a new release, host by host, while the fleet serves."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from disagg.cli.common.change import Change
from disagg.cli.common.context import note_interrupt, settings, stderr
from disagg.cli.common.hooks import hook_runner, hooks_view
from disagg.cli.common.options import AsJson, BreakLock, Yes, seconds_option
from disagg.cli.views.errors import error_views
from disagg.cli.views.items import plain_table
from disagg.cli.views.plans import plan_view
from disagg.cli.views.progress import DeployProgress, HostProgress
from disagg.config import Fleet, Host
from disagg.fleet.deploy.deployment import DeployResult, choose, exit_code, planner
from disagg.fleet.deploy.release import Installation
from disagg.fleet.lifecycle.state import State
from disagg.fleet.rollout.gate import ALTERNATIVES, PROMPT, TOKENS, Ask, RecordedAnswer, RecordedToken
from disagg.fleet.rollout.progress import RolloutReport
from disagg.fleet.rollout.rollout import Rollout
from disagg.inference.client import Client
from disagg.units import counted

_ASK_S = 120.0
_STYLE = {"rolled out": "green", "unchanged": "dim", "rolled back": "yellow", "left": "dim", "failed": "bold red"}
_ENDINGS = {
    "done": Text("all hosts run the new release", "green"),
    "unchanged": Text("all hosts ran it already", "dim"),
    "rolled back": Text("rolled back", "bold yellow"),
    "stopped": Text("stopped", "bold red"),
}


def rollout(
    context: typer.Context,
    *,
    max_unavailable: Annotated[
        int, typer.Option("--max-unavailable", min=1, metavar="N", help="How many hosts may be down at the same time.")
    ] = 1,
    timeout: Annotated[float, seconds_option(0, "Seconds for a restarted server to be healthy.")] = 300.0,
    new_answers: Annotated[
        bool, typer.Option("--new-answers", help="The new release may answer otherwise than the one that runs.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Return the hosts of an unfinished rollout to what they ran before.")
    ] = False,
    yes: Yes = False,
    break_lock: BreakLock = False,
    as_json: AsJson = False,
) -> None:
    """Deploy, then restart host by host while the fleet serves; go back at the first host that fails.

    After its restart each host must answer a fixed prompt as before. An interrupted rollout goes on with the next call.
    Exit code 0: all hosts run the new release; 1: it was rolled back or stopped; 4: a host cannot be reached.
    """
    change = Change("rollout --undo" if undo else "rollout", yes=yes, as_json=as_json)
    fleet = settings(context).fleet()
    hosts, state = choose(fleet, **settings(context).selection), State.of(fleet)
    progress = DeployProgress(stderr())
    work = Rollout(
        fleet,
        state,
        hosts,
        planner(Installation.current(fleet, state.tokens.all, returns=True)),
        asking(fleet, state),
        max_unavailable,
        timeout,
        new_answers=new_answers,
        break_lock=break_lock,
        report=HostProgress(stderr()).report,
        on_step=progress.report,
        hooks=hook_runner(fleet, "rollout"),
    )
    planned = [] if undo else _planned(change, fleet, work)
    _ask(change, work, planned, undo=undo)
    try:
        report = work.undo() if undo else work.run()
    except KeyboardInterrupt:
        begun = "no host is left half-way: `disagg rollout` goes on, `disagg rollout --undo` goes back"
        note_interrupt(f"interrupted: {begun if work.interrupted else 'no rollout is unfinished'}")
        raise
    body = {"fleet": fleet.name, "ok": report.exit_code == 0, **report.to_json()}
    change.finish(body, rollout_view(report, tuple(fleet.hosts)), code=report.exit_code)


def asking(fleet: Fleet, state: State) -> Ask:
    """Ask one host alone, as any client does."""

    def ask(host: Host) -> RecordedAnswer:
        alone = replace(fleet, hosts={host.table: fleet.hosts[host.table]})
        with Client(alone, token=state.tokens.current) as client:
            answer = client.generate(
                host.model,
                PROMPT,
                alone="decode" if "decode" in host.roles else "prefill",
                max_tokens=TOKENS,
                ignore_eos=True,
                logprobs=ALTERNATIVES,
                timeout=_ASK_S,
                cache_salt=secrets.token_hex(8),  # it is computed, not held from an earlier rollout
            )
        return RecordedAnswer(
            host.name, tuple(RecordedToken(one.id, one.logprob, tuple(one.top)) for one in answer.tokens)
        )

    return ask


def _planned(change: Change, fleet: Fleet, work: Rollout) -> list[DeployResult]:
    """Each host's plan. Shows them and exits if a host cannot be deployed."""
    with change.looking():
        planned = work.plan()
    if not all(one.ok for one in planned):
        body = {"fleet": fleet.name, "ok": False, "plans": [one.to_json() for one in planned]}
        change.finish(body, plan_view(planned, tuple(fleet.hosts)), code=exit_code(planned))
    return planned


def _ask(change: Change, work: Rollout, planned: Sequence[DeployResult], *, undo: bool) -> None:
    hooked = hooks_view(hook_runner(work.fleet, "rollout").planned("deploy", "restart"))
    going_on = work.interrupted is not None and not undo
    verb = "Go back on" if undo else "Go on with the rollout on" if going_on else "Roll out on"
    question = f"{verb} {counted(len(work.hosts), 'host')}?"
    change.ask(question, *([plan_view(planned), *hooked] if planned else []))


def rollout_view(report: RolloutReport, all_hosts: Collection[str] = ()) -> RenderableType:
    """A table, the failures with their hints, and the ending. `all_hosts`: the names of all hosts of the fleet."""
    table = plain_table("host", "outcome", "runs", bold=["host"], fold=["host"], dim=["runs"], gap=0)
    for one in report.hosts:
        table.add_row(one.host, Text(one.outcome, _STYLE[one.outcome]), one.release[:8] or "–")
    errors = error_views([(one.host, one.error) for one in report.hosts if one.error is not None], all_hosts)
    reason = [Text(f": {report.reason}")] if report.reason else []
    end = Text.assemble(_ENDINGS[report.ending], *reason)
    next_step = [Text("disagg rollout goes on, disagg rollout --undo goes back")] if report.ending == "stopped" else []
    return Group(table, *errors, Text(), end, *next_step)
