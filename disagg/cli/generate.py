"""`disagg generate`: text to stdout, metrics to stderr."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.cli.completion import complete_model
from disagg.cli.context import complain, settings, stderr, stdout
from disagg.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.config import Fleet
    from disagg.inference.client import AsyncClient
    from disagg.inference.several import Answer


class Side(StrEnum):
    """Which host runs a request by itself."""

    decode = "decode"
    prefill = "prefill"


def generate(
    context: typer.Context,
    *,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from stdin.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME",
            help="Repeat to ask several at once.",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from it.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's chat message.")] = False,
    alone: Annotated[Side | None, typer.Option(help="Run it all on this one host, without a hand-off.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from this share of probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Least probability, relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Over 1 makes repeats less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeatable.")] = None,
    logprobs: Annotated[int | None, typer.Option(min=0, help="Alternatives per token, with --json.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until the answer must be whole.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Continue PROMPT with one or several models of the fleet."""
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs shows its numbers in JSON only", "add --json")
    text = read_prompt(prompt, file)
    fleet = settings(context).fleet()
    models = choose_models(fleet, model or ())
    request: dict[str, Any] = {
        **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
        "logprobs": logprobs,
        "alone": alone.value if alone else None,
        "timeout": timeout,
    }
    _finish(_run(fleet, models, request, text, as_json), as_json)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from wherever it was given. UsageError if from nowhere, from two places, unreadable or empty."""
    if (prompt is None) == (file is None):
        fault = "there is no prompt" if prompt is None else "there are two prompts: an argument and --file"
        raise UsageError(fault, "give one of: PROMPT, -f FILE, or - for stdin")
    try:
        if file is not None:
            where, text = str(file), file.read_text(encoding="utf-8")
        elif prompt == "-":
            where, text = "stdin", sys.stdin.buffer.read().decode("utf-8")
        else:
            where, text = "PROMPT", prompt or ""
    except OSError as error:
        raise UsageError(f"cannot read the prompt from {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt from {file or 'stdin'} is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    if not text.strip():
        raise UsageError(f"the prompt from {where} is empty", "give some text to continue")
    return text


def choose_models(fleet: Fleet, names: Sequence[str]) -> list[str]:
    """The named models by canonical name, each once; the fleet's only one where none is named."""
    if names:
        return list(dict.fromkeys(fleet.model(name).name for name in names))
    if len(fleet.models) == 1:
        return list(fleet.models)
    raise UsageError(f"which model? {fleet.path.name} has {', '.join(fleet.models)}", "name one or more with -m")


def _run(fleet: Fleet, models: Sequence[str], request: dict[str, Any], prompt: str, as_json: bool) -> list[Answer]:
    import asyncio

    from disagg.inference.client import AsyncClient
    from disagg.inference.several import Answer, ask, ignore

    answers = [Answer(model) for model in models]

    async def run() -> None:
        async with AsyncClient(fleet) as client:
            if as_json:
                await ask(client.stream, answers, request, ignore)
            elif len(answers) == 1:
                await ask(client.stream, answers, request, _write)
                _end_line(answers[0])
            else:
                await _ask_several(client, answers, request, prompt)

    asyncio.run(run())
    return answers


async def _ask_several(client: AsyncClient, answers: Sequence[Answer], request: dict[str, Any], prompt: str) -> None:
    """On a terminal: panels that fill at the same time. Elsewhere: each text under a header when it is whole."""
    from rich.live import Live

    from disagg.cli.views.stream import LiveView, final_view
    from disagg.inference.several import ask

    console = stdout()
    if console.is_terminal:
        with Live(LiveView(prompt, answers), console=console, refresh_per_second=12, transient=True):
            await ask(client.stream, answers, request)
        console.print(final_view(prompt, answers, console.width))
        return

    def write_whole(answer: Answer, text: str) -> None:
        if answer.completion is not None:
            sys.stdout.write(f"== {answer.model} ==\n{answer.text}\n")
            sys.stdout.flush()

    await ask(client.stream, answers, request, write_whole)


def _write(answer: Answer, text: str) -> None:
    """Pieces as they come; control characters reach files and pipes as they are, but no terminal."""
    from disagg.cli.views.stream import printable

    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _end_line(answer: Answer) -> None:
    if answer.text and not answer.text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()


def _finish(answers: Sequence[Answer], as_json: bool) -> None:
    """Metrics, errors and the exit code: that of the first error."""
    import json

    from disagg.cli.views.metrics import metrics_view

    errors = [answer.error for answer in answers if answer.error is not None]
    if as_json:
        typer.echo(json.dumps({"results": [answer.to_json() for answer in answers]}, indent=2))
    elif completions := [answer.completion for answer in answers if answer.completion is not None]:
        stderr().print(metrics_view(completions))
    if errors and len(answers) == 1:
        raise errors[0]
    for answer in answers:
        if answer.error is not None:
            stderr().print(f"{answer.model}:", style="bold")
            complain(answer.error)
    if errors:
        raise typer.Exit(errors[0].exit_code)
