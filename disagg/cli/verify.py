"""`disagg verify`: compare a hand-off with each engine alone: tokens, and next-token distributions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.completion import complete_model
from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, DTypeName, PrefillEngineName
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
    engine: Annotated[
        PrefillEngineName | None,
        typer.Option(help="Of the prefill end. Default: that of the model's prefill host, or transformers."),
    ] = None,
    prefill_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The Python of that engine's environment, if it has one of its own."),
    ] = None,
    decode_model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Weights of another form for MLX, if MODEL is a folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run MODEL through the hand-off and through each engine alone, and compare. Exit code 1: they differ by more than
    rounding, or than the forms of their weights, explains.

    Both engines are loaded on this machine, by this command: it asks no server of the fleet.
    """
    from disagg.api.verify import VerifyReport
    from disagg.fleet.machine.process import python_command, run_json

    given: dict[str, object] = {"--prompt-tokens": prompt_tokens, "--max-tokens": max_tokens, "--chunk": chunk}
    given |= {"--dtype": dtype, "--prefill-python": prefill_python}
    options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    python, environment = python_command(None)
    folders = _folders(model, decode_model, engine)
    subject = folders or _named(settings(context), model, decode_model, engine)
    argv = [*python, "disagg.verify", *subject, *options]
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
    if not folders:
        from disagg.fleet.lifecycle.status.verdicts import Verdict, keep

        keep(settings(context).fleet(), Verdict(report.architecture, report.dtype, report.versions))


def _folders(model: str, decode: Path | None, engine: PrefillEngineName | None) -> list[str]:
    """The arguments that name the two models if MODEL is a folder; none if it is the name of one."""
    from disagg.errors import UsageError

    is_path = "/" in model or model.startswith((".", "~"))
    for path in [*([model] if is_path else []), *([str(decode)] if decode else [])]:
        if not Path(path).is_dir():
            raise UsageError(f"no such folder: {path}", "give a model of hosts.toml, or the path of a model folder")
    if not Path(model).is_dir():
        return []
    sources = [str(Path(one).resolve()) for one in (model, decode or model)]
    return [*sources, *(["--prefill-engine", engine] if engine else [])]


def _named(chosen: Settings, model: str, decode: Path | None, engine: PrefillEngineName | None) -> list[str]:
    """The arguments for a model of hosts.toml: its sources, its context, and how its prefill host runs it."""
    from disagg.errors import UsageError

    if decode:
        raise UsageError(f"{model} has a source for MLX in hosts.toml", "leave --decode-model out")
    fleet = chosen.fleet()
    known = fleet.model(model)
    hosts = [host.engine for host in fleet.hosts.values() if host.model == known.name and "prefill" in host.roles]
    wanted = [str(engine)] if engine else [str(one) for one in PrefillEngineName]
    served = next((one for one in hosts if one.name in wanted), None)
    name = served.name if served else str(engine or PrefillEngineName.TRANSFORMERS)
    sources = {str(one): source for one, source in known.sources.items()}
    for source in (name, "mlx"):
        if source not in sources:
            raise UsageError(
                f"{fleet.path.name} has no {source} source for {known.name}: there is nothing to compare",
                f"add {source} = ... to its sources, or give the path of a model folder",
            )
    arguments = [sources[name], sources["mlx"], "--context", str(known.context), "--prefill-engine", name]
    return [*arguments, *(["--quantization", served.quantization] if served and served.quantization else [])]
