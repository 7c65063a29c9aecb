"""`disagg generate`: text to stdout, metrics to stderr."""

from __future__ import annotations

import importlib
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from disagg.api.requests import DEFAULT_DEADLINE_S, MAX_DEADLINE_S
from disagg.api.sampling import Sampling
from disagg.cli.completion import complete_model
from disagg.cli.context import error_console, note_interrupt, print_error, print_json, settings, stderr, stdout
from disagg.cli.options import AsJson, sampling_option
from disagg.errors import Cancelled, DisaggError, RequestError, UnknownModel, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.cli.views.stream import AnswersView
    from disagg.config import Fleet
    from disagg.inference.client import AsyncClient
    from disagg.inference.several import Answer

_DEFAULTS = Sampling()
_EXAMPLE = 'disagg generate -m NAME "text to continue"'


class Side(StrEnum):
    """The role of the host that runs a request without a hand-off."""

    decode = "decode"
    prefill = "prefill"


class KVFailure(StrEnum):
    """What follows if no prefill host delivers the KV."""

    fallback = "fallback"
    fail = "fail"


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
    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME",
            help="A model of hosts.toml; repeat it to run several at once.",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from it.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")] = False,
    alone: Annotated[Side | None, typer.Option(help="Run on one host of this role, without a hand-off.")] = None,
    max_tokens: Annotated[int, sampling_option("max_tokens")] = _DEFAULTS.max_tokens,
    temperature: Annotated[float, sampling_option("temperature", "X")] = _DEFAULTS.temperature,
    top_p: Annotated[float, sampling_option("top_p", "X")] = _DEFAULTS.top_p,
    top_k: Annotated[int, sampling_option("top_k")] = _DEFAULTS.top_k,
    min_p: Annotated[float, sampling_option("min_p", "X")] = _DEFAULTS.min_p,
    repetition_penalty: Annotated[float, sampling_option("repetition_penalty", "X")] = _DEFAULTS.repetition_penalty,
    seed: Annotated[int | None, sampling_option("seed")] = _DEFAULTS.seed,
    stop: Annotated[list[str] | None, sampling_option("stop", "TEXT")] = None,
    logprobs: Annotated[int | None, sampling_option("logprobs")] = _DEFAULTS.logprobs,
    timeout: Annotated[
        float, typer.Option(metavar="S", help=f"Seconds until the answer must be complete, at most {MAX_DEADLINE_S:g}.")
    ] = DEFAULT_DEADLINE_S,
    on_kv_failure: Annotated[
        KVFailure,
        typer.Option(help="If no prefill host delivers the KV: compute the prompt on the decode host, or fail."),
    ] = KVFailure.fallback,
    explain: Annotated[bool, typer.Option("--explain", help="Show first which hosts are chosen, and why.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with one or several models: text to stdout, metrics to stderr."""
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs: its figures are printed as JSON only", "add --json")
    fleet = settings(context).fleet()
    _import_client_meanwhile()
    words = [word for word in (first, second, *context.args) if word is not None]
    call = parse_words(fleet, words, model or (), has_file=file is not None)
    text = read_prompt(call.prompt, file)
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
        "on_kv_failure": on_kv_failure.value,
    }
    _run(fleet, _answers(call.models), request, Shown(as_json, explain))


def _import_client_meanwhile() -> None:
    """Import the HTTP client in another thread while the prompt is read: it takes about 0.2 s."""
    import threading

    threading.Thread(target=importlib.import_module, args=("disagg.inference.client",), daemon=True).start()


class Call(NamedTuple):
    """What the arguments mean. `prompt`: None if it is read from a file, "-" if from stdin."""

    models: list[str]
    prompt: str | None


def parse_words(fleet: Fleet, words: Sequence[str], named: Sequence[str], *, has_file: bool) -> Call:
    """The models and the prompt of `disagg generate [-m NAME]... [MODEL] [PROMPT]`.

    Without -m, the first argument is the model if a prompt follows, by argument, --file or a pipe. Raises UsageError
    with the command to type, and UnknownModel.
    """
    rest = list(words)
    piped = not sys.stdin.isatty()
    if not named and len(rest) == 2 and is_model(fleet, rest[1]) and not is_model(fleet, rest[0]):
        raise UsageError(
            f"{rest[0]} is not a model", f"the model comes first: disagg generate {shlex.join(rest[::-1])}"
        )
    if not named and rest and (len(rest) == 2 or ((has_file or piped) and is_model(fleet, rest[0]))):
        named = [rest.pop(0)]
    if not named and len(rest) == 1 and is_model(fleet, rest[0]):
        raise UsageError(f"there is no prompt for {rest[0]}", f'disagg generate {rest[0]} "text to continue"')
    if len(rest) > 1:
        raise UsageError(f"{len(words)} arguments: the prompt is one", f"quote it: {_EXAMPLE}")
    if not rest and not has_file and not piped:
        raise UsageError("there is no prompt", f"{_EXAMPLE}, or pipe it in, or -f FILE")
    prompt = rest[0] if rest else None if has_file else "-"
    return Call(choose_models(fleet, named), prompt)


def is_model(fleet: Fleet, word: str) -> bool:
    """Whether the word is the name or an alias of one of the fleet's models."""
    try:
        fleet.model(word)
    except UnknownModel:
        return False
    return True


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt: the argument, or the text of the file, or of stdin for "-". UsageError if it cannot be read, if it
    is empty, or if there are two."""
    if prompt is not None and file is not None:
        raise UsageError("there are two prompts: an argument and --file", "leave out one of them")
    try:
        if file is not None:
            source, text = str(file), file.read_text(encoding="utf-8")
        elif prompt == "-":
            source, text = "stdin", sys.stdin.buffer.read().decode("utf-8")
        else:
            source, text = "", prompt or ""
    except OSError as error:
        raise UsageError(f"cannot read the prompt from {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt from {file or 'stdin'} is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    if not text.strip():
        raise UsageError(f"the prompt{f' from {source}' if source else ''} is empty", _EXAMPLE)
    return text


def choose_models(fleet: Fleet, names: Sequence[str]) -> list[str]:
    """The named models by canonical name, each once; the fleet's only model if none is named. UsageError if the fleet
    has several."""
    if names:
        return list(dict.fromkeys(fleet.model(name).name for name in names))
    if len(fleet.models) == 1:
        return list(fleet.models)
    raise UsageError(f"which model? {fleet.path.name} has {', '.join(fleet.models)}", f"name one: {_EXAMPLE}")


class Shown(NamedTuple):
    """How answers are shown. ranking: also which hosts they may come from."""

    as_json: bool
    ranking: bool


def _run(fleet: Fleet, answers: Sequence[Answer], request: dict[str, Any], shown: Shown) -> None:
    """Ask the models and show the answers. Ctrl-C shows what has arrived."""
    import asyncio

    from disagg.inference.client import AsyncClient
    from disagg.inference.several import ask

    as_json = shown.as_json
    prompt = request.get("prompt") or ""
    view = _view(answers, prompt, as_json)

    async def run() -> None:
        async with AsyncClient(fleet) as client:
            await client.connect(*(answer.model for answer in answers))  # so that no request's time includes it
            if shown.ranking:
                _explain(client, answers, request, as_json)
            with view:
                await ask(client.stream, answers, request, view)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        for answer in answers:
            if answer.completion is None and answer.error is None:
                answer.error = Cancelled("interrupted before the answer was complete")
        _finish(view, answers, as_json)
        note_interrupt("interrupted")
        raise
    _finish(view, answers, as_json)
    _raise_errors(answers)


def _answers(models: Sequence[str]) -> list[Answer]:
    from disagg.inference.several import Answer

    return [Answer(model) for model in models]


def _explain(client: AsyncClient, answers: Sequence[Answer], request: dict[str, Any], as_json: bool) -> None:
    """Note the ranking of each answer's hosts, and show it unless it is printed as JSON."""
    from disagg.cli.views.ranking import ranking_view

    for answer in answers:
        answer.ranking = client.explain(answer.model, **request)
        if not as_json:
            stderr().print(ranking_view(answer.ranking))


def _view(answers: Sequence[Answer], prompt: str, as_json: bool) -> AnswersView:
    from disagg.cli.views.stream import AnswersView, HeadedTexts, OneText, Panels

    if as_json:
        return AnswersView(answers)
    if len(answers) == 1:
        return OneText(answers)
    return Panels(answers, prompt, stdout()) if stdout().is_terminal else HeadedTexts(answers)


def _finish(view: AnswersView, answers: Sequence[Answer], as_json: bool) -> None:
    """Show the rest of the answers, and the metrics of those that are complete."""
    from disagg.cli.views.metrics import metrics_view

    view.finish()
    if as_json:
        print_json({"results": [answer.to_json() for answer in answers]})
    elif completions := [answer.completion for answer in answers if answer.completion is not None]:
        stderr().print(metrics_view(completions))


def _raise_errors(answers: Sequence[Answer]) -> None:
    """Print the errors of several models and exit with the first one's code; raise that of a single model."""
    failed = [(answer.model, _for_command_line(answer.error)) for answer in answers if answer.error is not None]
    if failed and len(answers) == 1:
        raise failed[0][1]
    for model, error in failed:
        error_console().print(f"{model}:", style="bold")
        print_error(error)
    if failed:
        raise typer.Exit(failed[0][1].exit_code)


def _for_command_line(error: DisaggError) -> DisaggError:
    """The same error, naming the option instead of the field of the request: `--top-p: ...` for `top_p: ...`."""
    field = error.message.removeprefix("sampling.").partition(":")[0].partition("[")[0]
    if not isinstance(error, RequestError) or field not in {*Sampling.__struct_fields__, "timeout", "deadline_s"}:
        return error
    option = "timeout" if field == "deadline_s" else field.replace("_", "-")
    return type(error)(f"--{option}:{error.message.partition(':')[2]}", error.hint)
