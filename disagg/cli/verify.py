"""`disagg verify`: compare the tokens of a hand-off with those of each engine alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.completion import complete_model
from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, DTypeName
from disagg.errors import DisaggError

if TYPE_CHECKING:
    from disagg.cli.common.context import Settings


def verify(
    context: typer.Context,
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model of hosts.toml, or the path of a model folder.",
            autocompletion=complete_model,
        ),
    ],
    prompt_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Length of the prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Length of the answer.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, metavar="N", help="Prompt tokens per prefill chunk.")] = None,
    dtype: Annotated[DTypeName | None, typer.Option(help="Of weights, KV and compute.")] = None,
    timeout: Annotated[float, typer.Option(min=1, metavar="S", help="Seconds for all of it.")] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Run MODEL through the hand-off and through each engine alone, and compare. Exit code 1: they differ."""
    from disagg.api.verify import VerifyReport
    from disagg.fleet.machine.process import python_command, run_json

    given = {"--prompt-tokens": prompt_tokens, "--max-tokens": max_tokens, "--chunk": chunk, "--dtype": dtype}
    options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    python, environment = python_command(None)
    argv = [*python, "disagg.verify", *_subject(settings(context), model), *options]
    try:
        with stderr().status(f"verifying {model}: hand-off, prefill alone, decode alone …"):
            report = VerifyReport.received(run_json(argv, environment, timeout), "python -m disagg.verify")
    except DisaggError as error:
        if as_json:
            print_json({"error": error.to_json(), "ok": False})
        raise
    if as_json:
        print_json(report.to_json())
    else:
        from disagg.cli.views.verify import verify_view

        stdout().print(verify_view(report))
    if not report.ok:
        raise typer.Exit(1)


def _subject(chosen: Settings, model: str) -> list[str]:
    """The arguments that name the model: a folder for both engines, or the sources and the context in hosts.toml."""
    from disagg.errors import UsageError

    if Path(model).is_dir():
        return [str(Path(model).resolve())] * 2
    if "/" in model or model.startswith((".", "~")):
        raise UsageError(f"no such folder: {model}", "give a model of hosts.toml, or the path of a model folder")
    fleet = chosen.fleet()
    known = fleet.model(model)
    missing = [engine for engine in ("transformers", "mlx") if engine not in known.sources]
    if missing:
        raise UsageError(
            f"{fleet.path.name} has no {missing[0]} source for {known.name}: there is nothing to compare",
            f"add {missing[0]} = ... to its sources, or give the path of a model folder",
        )
    return [known.sources["transformers"], known.sources["mlx"], "--context", str(known.context)]
