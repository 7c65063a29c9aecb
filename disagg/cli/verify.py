"""`disagg verify`: compare hand-offs and splits with each host, or each engine, alone: tokens, and next-token
distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer
from rich.markup import escape

from disagg.api.engines import engines_for
from disagg.api.verify import HostsReport, VerifyReport
from disagg.cli.common.completion import complete_model
from disagg.cli.common.context import Settings, print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, choice_option, one_of, seconds_option, with_options
from disagg.config import DType, Fleet, Host, Model
from disagg.errors import CapabilityMissing, DisaggError, ServerUnavailable, UsageError
from disagg.extras import require
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.status.verdicts import Verdict, VerifiedEngine, keep

if TYPE_CHECKING:
    from disagg.verify.hosts import Divided

PROMPT_TOKENS, MAX_TOKENS = 200, 64
STATUS_S = 30.0
PREFILL_ENGINES: Final = [one.name for one in engines_for("prefill", loads=True)]
DECODE_ENGINE: Final = engines_for("decode", loads=True)[0].name


def _options_of_here(
    *,
    chunk: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --here: prompt tokens per prefill chunk.")
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(metavar="DTYPE", help=f"With --here: of weights, KV and compute: {one_of(get_args(DType))}."),
    ] = None,
    prefill_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="With --here: the Python of that engine's environment, if it has its own."),
    ] = None,
    engine: Annotated[
        str | None,
        choice_option(
            PREFILL_ENGINES,
            metavar="NAME",
            help=f"With --here: of the prefill end: {one_of(PREFILL_ENGINES)}. Default: that of the model's prefill "
            f"host, or {PREFILL_ENGINES[0]}.",
        ),
    ] = None,
    decode_model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Weights of another form for MLX, if MODEL is a folder.")
    ] = None,
) -> dict[str, Any]:
    """The values that were given, by the names of their options."""
    return {f"--{name.replace('_', '-')}": value for name, value in locals().items() if value is not None}


@with_options(_options_of_here)
def verify(
    context: typer.Context,
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model of hosts.toml, or the path of a model folder.", autocompletion=complete_model
        ),
    ],
    here: Annotated[
        bool, typer.Option("--here", help="Load the model in both engines on this machine, as always with a folder.")
    ] = False,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Length of a prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Length of an answer.")] = None,
    options: dict[str, Any],
    timeout: Annotated[float, seconds_option(1, "Seconds for the whole command.")] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Answer the same prompts with a hand-off, with splits and by each host alone, through the fleet's servers, and
    compare.

    With --here, or the folder of a model, each engine runs on this machine instead. Exit code 1: the answers differ by
    more than rounding, or than the forms of the weights, explains.
    """
    lengths = {"--prompt-tokens": prompt_tokens, "--max-tokens": max_tokens}
    try:
        folders = _folders(model, options)
        if folders or here:
            ok = _here(settings(context), model, folders, {**lengths, **options}, timeout, as_json=as_json)
        else:
            _require_here_for(model, options)
            tokens = prompt_tokens or PROMPT_TOKENS, max_tokens or MAX_TOKENS
            ok = _on_hosts(settings(context), model, tokens, timeout, as_json=as_json)
    except DisaggError as error:
        if as_json:
            print_json({"error": error.to_json(), "ok": False})
        raise
    if not ok:
        raise typer.Exit(1)


def _here(
    chosen: Settings, model: str, folders: Sequence[str], options: Mapping[str, Any], timeout: float, *, as_json: bool
) -> bool:
    """Run both engines on this machine. folders: of the two models; without any, a verdict is kept for the fleet whose
    model it is."""
    from disagg.cli.views.verify import verify_view
    from disagg.fleet.machine.process import python_command, run_json

    arguments = [*(folders or _named(chosen, model, options))]
    for name, value in options.items():
        if value is not None and name not in ("--engine", "--decode-model"):
            arguments += [name, str(value)]
    require("decode", *(() if "--prefill-python" in options else ("prefill",)))
    python, environment = python_command(None)
    with stderr().status(f"verifying {escape(model)}: hand-off, splits, prefill alone, decode alone …"):
        found = run_json([*python, "disagg.verify", *arguments], environment, timeout)
        report = VerifyReport.received(found, "python -m disagg.verify")
    if as_json:
        print_json(report.to_json())
    else:
        stdout().print(verify_view(report))
    if report.ok and not folders:
        prefill, decode = (VerifiedEngine(report.dtype, one) for one in (report.prefill_versions, report.versions))
        keep(chosen.fleet(), Verdict(report.architecture, prefill, decode))
    return report.ok


def _require_here_for(model: str, options: Mapping[str, Any]) -> None:
    """UsageError if an option was given that only engines on this machine take."""
    for name, value in options.items():
        raise UsageError(
            f"{name}: the fleet's hosts run {model} as hosts.toml says",
            f"disagg verify {model} --here {name} {value}, which loads it on this machine",
        )


def _on_hosts(chosen: Settings, name: str, tokens: tuple[int, int], timeout: float, *, as_json: bool) -> bool:
    """Compare the answers of the fleet's servers. tokens: of a prompt, about, and of an answer."""
    from disagg.inference.client import Client
    from disagg.verify.hosts import FleetClients, Way, pairs_of, require_lengths, verify_hosts

    fleet = chosen.fleet()
    model, state = fleet.model(name), State.of(fleet)
    pairs_of(fleet, model)
    require_lengths(model, *tokens)
    if any(host.keeps for host in fleet.hosts.values()):
        with stderr().status(f"loading {escape(model.name)} …"), Client(fleet, token=state.tokens.current) as client:
            fleet = client.load_model(model.name)
    pairs = pairs_of(fleet, model)
    statuses = _healthy(fleet, model, state, sorted({host.name for pair in pairs for host in pair}))
    with (
        stderr().status(f"verifying {escape(model.name)} …") as status,
        FleetClients(fleet, model, state.tokens.current, timeout) as clients,
    ):
        clients.report = lambda way: status.update(f"verifying {escape(model.name)}: {way} …")
        prompts = clients.prompts(Way((pairs[0][1].name,), "decode"), tokens[0])
        divided = partial(_divided, statuses)
        report = verify_hosts(fleet, model, clients.ask, prompts, tokens[1], divided=divided)
    if as_json:
        print_json(report.to_json())
    else:
        from disagg.cli.views.verify import hosts_view

        stdout().print(hosts_view(report))
    _keep(fleet, report, statuses)
    return report.ok


def _divided(statuses: Mapping[str, HostStatus], prefill: Host, decode: Host) -> Divided:
    """How these two hosts can divide the model's layers, as they state."""
    from disagg.verify.hosts import Divided

    ends = statuses[prefill.name], statuses[decode.name]
    layers = ends[1].model_layers or 0
    unknown = "" if layers else f"{decode.name} does not state how many layers the model has"
    refusals = [one.split_refusal for one in ends if one.split_refusal]
    return Divided(layers, next(iter(refusals), unknown), ends[0].layers)


def _healthy(fleet: Fleet, model: Model, state: State, names: list[str]) -> Mapping[str, HostStatus]:
    """The status of each of these hosts. Raises ServerUnavailable if one does not serve, CapabilityMissing if one only
    simulates."""
    from disagg.fleet.lifecycle.status.ask import poll

    here = f"disagg verify {model.name} --here loads both engines on this machine instead"
    statuses = poll(fleet, state.tokens.known, state, names, STATUS_S)
    for one in statuses:
        if not one.ok:
            message = f"{model.name} is not verified: {one.host} is {one.state}: {one.why}"
            raise ServerUnavailable(message, f"{one.hint}; {here}" if one.hint else here)
        if one.simulated:
            raise CapabilityMissing(f"{one.host} simulates {model.name}: there are no answers to compare", here)
    return {one.host: one for one in statuses}


def _keep(fleet: Fleet, report: HostsReport, statuses: Mapping[str, HostStatus]) -> None:
    """Keep a verdict about each pair whose answers are right."""

    def verified(name: str) -> VerifiedEngine:
        return VerifiedEngine(fleet.hosts[name].engine.dtype, statuses[name].versions)

    for pair in report.pairs:
        fingerprint = statuses[pair.prefill].fingerprint
        if pair.ok and fingerprint is not None:
            keep(fleet, Verdict(fingerprint.architecture, verified(pair.prefill), verified(pair.decode)))


def _folders(model: str, options: Mapping[str, Any]) -> list[str]:
    """The arguments that name the two models if MODEL is a folder; none if it is the name of one."""
    decode, engine = options.get("--decode-model"), options.get("--engine")
    is_path = "/" in model or model.startswith((".", "~"))
    for path in [*([model] if is_path else []), *([str(decode)] if decode else [])]:
        if not Path(path).is_dir():
            raise UsageError(f"no such folder: {path}", "give a model of hosts.toml, or the path of a model folder")
        if not _has_model(path):
            raise UsageError(
                f"{path} has no config.json", "a model folder has config.json, weights and tokenizer files"
            )
    if not _has_model(model):
        return []
    sources = [str(Path(one).resolve()) for one in (model, decode or model)]
    return [*sources, *(["--prefill-engine", engine] if engine else [])]


def _has_model(path: str) -> bool:
    return (Path(path) / "config.json").is_file()


def _named(chosen: Settings, model: str, options: Mapping[str, Any]) -> list[str]:
    """The arguments for a model of hosts.toml: its sources, its context, and how its prefill host runs it."""
    engine = options.get("--engine")
    if "--decode-model" in options:
        raise UsageError(f"{model} has a source for MLX in hosts.toml", "leave --decode-model out")
    fleet = chosen.fleet()
    known = fleet.model(model)
    hosts = [host.engine for host in fleet.hosts.values() if host.model == known.name and "prefill" in host.roles]
    wanted = [engine] if engine else PREFILL_ENGINES
    served = next((one for one in hosts if one.name in wanted), None)
    name = served.name if served else engine or PREFILL_ENGINES[0]
    for source in (name, DECODE_ENGINE):
        if source not in known.sources:
            raise UsageError(
                f"{fleet.path.name} has no {source} source for {known.name}: there is nothing to compare",
                f"add {source} = ... to its sources, or give the path of a model folder",
            )
    sources = [known.sources[one] for one in (name, DECODE_ENGINE)]
    quantization = ["--quantization", served.quantization] if served and served.quantization else []
    return [*sources, "--context", str(known.context), "--prefill-engine", name, *quantization]
