"""`disagg generate`: text to stdout, metrics to stderr."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.common.completion import complete_model
from disagg.cli.common.context import error_console, note_interrupt, print_error, print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, model_option, one_of, with_options
from disagg.cli.common.process import while_stdout_is_read
from disagg.cli.common.sampling import Logprobs, for_command_line, request_options
from disagg.cli.words import parse_words, read_prompt
from disagg.errors import Cancelled, UsageError
from disagg.inference.attempt import Alone
from disagg.inference.policy import OnKVFailure
from disagg.units import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.cli.views.stream import AnswersView
    from disagg.config import Fleet
    from disagg.inference.client import AsyncClient
    from disagg.inference.hosts.route import Choice, Ranking
    from disagg.inference.several import ModelAnswer

NOTE = "expected: seconds that the request should spend on the host. Hosts are tried from top to bottom."
_SHOWN_S = 0.00005  # 0.1 ms when rounded
LOCAL = "If little of the prompt is left to compute, the decode host may compute it, without a prefill host."


@with_options(request_options)
def generate(
    context: typer.Context,
    *,
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model of hosts.toml. Left out with -m, or if the fleet has one model.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The text to continue. - or none: read stdin.", show_default=False),
    ] = None,
    model: Annotated[list[str] | None, model_option("A model of hosts.toml; repeat it to run several at once.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from it.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")] = False,
    alone: Annotated[
        Alone | None,
        typer.Option(metavar="ROLE", help="Run on one host, without a hand-off: decode, prefill or whole."),
    ] = None,
    options: dict[str, Any],
    logprobs: Logprobs = None,
    on_kv_failure: Annotated[
        OnKVFailure,
        typer.Option(
            metavar="HOW",
            help=f"If no prefill host delivers the KV: {one_of(get_args(OnKVFailure))}. "
            "The first computes it on the decode host.",
        ),
    ] = "fallback",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show first which hosts are chosen, and why; last what the figures mean.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with one or several models: text to stdout, metrics to stderr."""
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs: its figures are printed as JSON only", "add --json")
    fleet = settings(context).fleet()
    _import_client_meanwhile()
    words = [word for word in (first, second, *context.args) if word is not None]
    models, prompt = parse_words(fleet, words, model or (), has_file=file is not None)
    _require_hosts(fleet, models, alone)
    text = read_prompt(prompt, file, max(fleet.model(name).context for name in models))
    request: dict[str, Any] = {
        **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}),
        **options,
        "logprobs": logprobs,
        "alone": alone,
        "on_kv_failure": on_kv_failure,
    }
    _run(fleet, models, request, as_json=as_json, explain=explain)


def _require_hosts(fleet: Fleet, models: Sequence[str], alone: Alone | None) -> None:
    """UsageError if hosts.toml has no host of the role of --alone for one of the models."""
    for name in models:
        if alone is not None and not fleet.serving(name, alone):
            raise UsageError(f"--alone {alone}: no {alone} host serves {name}", "add one to hosts.toml")


def _import_client_meanwhile() -> None:
    """Import the HTTP client in another thread while the prompt is read: it takes about 0.2 s."""
    import threading

    threading.Thread(target=importlib.import_module, args=("disagg.inference.client",), daemon=True).start()


def _run(fleet: Fleet, models: Sequence[str], request: dict[str, Any], *, as_json: bool, explain: bool) -> None:
    """Ask the models and show the answers. Ctrl-C shows what has arrived."""
    import uvloop

    from disagg.inference.client import AsyncClient
    from disagg.inference.several import ModelAnswer, ask

    answers = [ModelAnswer(model) for model in models]
    prompt = request.get("prompt") or ""
    view = _view(answers, prompt, as_json)

    async def run() -> None:
        async with AsyncClient(fleet) as client:
            await client.connect(*(answer.model for answer in answers))  # so that no request's time includes it
            if explain:
                _explain(client, answers, request, as_json)
            with view:
                await while_stdout_is_read(ask(client.stream, answers, request, view))

    try:
        uvloop.run(run())
    except KeyboardInterrupt:
        for answer in answers:
            if answer.completion is None and answer.error is None:
                answer.error = Cancelled("interrupted before the answer was complete")
        _finish(view, answers, as_json=as_json, explain=explain)
        note_interrupt("interrupted")
        raise
    _finish(view, answers, as_json=as_json, explain=explain)
    _raise_errors(answers)


def _explain(client: AsyncClient, answers: Sequence[ModelAnswer], request: dict[str, Any], as_json: bool) -> None:
    """Note the ranking of each answer's hosts, and show it unless it is printed as JSON."""
    for answer in answers:
        answer.ranking = client.explain(answer.model, **request)
        if not as_json:
            stderr().print(ranking_view(answer.ranking))


def _view(answers: Sequence[ModelAnswer], prompt: str, as_json: bool) -> AnswersView:
    from disagg.cli.views.stream import AnswersView, HeadedTexts, OneText, Panels

    if as_json:
        return AnswersView(answers)
    if len(answers) == 1:
        return OneText(answers)
    return Panels(answers, prompt, stdout()) if stdout().is_terminal else HeadedTexts(answers)


def _finish(view: AnswersView, answers: Sequence[ModelAnswer], *, as_json: bool, explain: bool) -> None:
    """Show the rest of the answers, and the metrics of those that are complete. With --explain also their formulas."""
    from disagg.cli.views.metrics import metrics_view, together_view
    from disagg.inference.several import figures

    view.finish()
    complete = sum(answer.completion is not None for answer in answers)
    together = figures(answers) if complete > 1 else None
    if as_json:
        more = {"together": together.to_json()} if together else {}
        print_json({"results": [answer.to_json() for answer in answers], **more})
    elif completions := [answer.completion for answer in answers if answer.completion is not None]:
        stderr().print(metrics_view(completions, view.noted_texts, formulas=explain))
        if together:
            stderr().print(together_view(together, formulas=explain))


def _raise_errors(answers: Sequence[ModelAnswer]) -> None:
    """Print the errors of several models and exit with the first one's code; raise that of a single model."""
    failed = [(answer.model, for_command_line(answer.error)) for answer in answers if answer.error is not None]
    if failed and len(answers) == 1:
        raise failed[0][1]
    for model, error in failed:
        error_console().print(f"{model}:", style="bold")
        print_error(error)
    if failed:
        raise typer.Exit(failed[0][1].exit_code)


def ranking_view(ranking: Ranking) -> RenderableType:
    """The hosts of each role, best first, then those that get no request now."""
    table = Table(
        title=f"hosts for {ranking.candidates.model}", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False
    )
    for name in ("role", "host", "expected", "why"):
        table.add_column(name, overflow="fold", justify="right" if name == "expected" else "left")
    for role, choices in (("decode", ranking.decode), ("prefill", ranking.prefill), ("whole", ranking.whole)):
        for choice in choices:
            table.add_row(role, choice.host.name, seconds(choice.cost_s), _why(choice))
    for host, obstacle in ranking.left_out.items():
        table.add_row("", Text(host, "dim"), "–", Text(f"gets no request: {obstacle}", "yellow"))
    notes = [NOTE, LOCAL] if ranking.offer else [NOTE]
    return Group(table, Text("\n".join(notes), "dim"))


def _why(choice: Choice) -> str:
    """Why a host may get the request, as in `Choice.reason`, its times in the units of the table."""
    parts = [f"{name} {seconds(cost)}" for name, cost in choice.costs.items() if cost >= _SHOWN_S]
    held = [f"holds {choice.held_tokens} tokens of the prompt"] if choice.held_tokens else []
    return ", ".join(held + parts) or "idle"
