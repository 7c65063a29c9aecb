"""Options that several commands have, and those of sampling with the bounds that the servers apply."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from disagg.api.base import Bounds, bounds
from disagg.api.requests import MAX_DEADLINE_S
from disagg.api.sampling import Sampling
from disagg.cli.common.completion import complete_host, complete_model
from disagg.cli.common.context import CommandOutput, settings
from disagg.errors import UsageError

_Function = Callable[..., None]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
BreakLock = Annotated[bool, typer.Option("--break-lock", help="Take over a host's lock that another command holds.")]
HostName = Annotated[str, typer.Argument(metavar="HOST", help="A host of hosts.toml.", autocompletion=complete_host)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def one_of(choices: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = choices
    return f"{', '.join(first)} or {last}"


class _PlainFlags:
    """Shows flags in help texts without a type: typer prints `<bool>` after each."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]  # of typer's class beside this one
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command that also takes the options of every command: `disagg status --config FILE`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for parameter in self.params:
            if parameter.param_type_name == "argument":  # typer describes some as <list[str]>
                vars(parameter)["display_type_rich"] = lambda ctx: None
        self.params += shared_options()


class CommandGroup(_PlainFlags, TyperGroup):
    """A group of commands that also takes the options of every command: `disagg --config FILE status`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.params += shared_options()


def command_group(name: str, help: str) -> typer.Typer:
    """A command that has subcommands only."""
    context = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(name=name, cls=CommandGroup, help=help, no_args_is_help=True, context_settings=context)


def with_options(shared: Callable[..., dict[str, Any]], **defaults: Any) -> Callable[[_Function], _Function]:
    """Give a command the options of this function in place of its parameter `options`, which gets what the function
    returns. typer makes options of a function's signature. defaults: other ones than the function's."""

    def decorate(command: _Function) -> _Function:
        theirs = dict(inspect.signature(shared, eval_str=True).parameters)
        theirs |= {name: theirs[name].replace(default=value) for name, value in defaults.items()}
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            parameters += theirs.values() if parameter.name == "options" else [parameter]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            own = {name: value for name, value in values.items() if name not in theirs}
            command(**own, options=shared(**{name: values[name] for name in theirs}))

        vars(run).update(
            __signature__=signature.replace(parameters=parameters),
            __annotations__={parameter.name: parameter.annotation for parameter in parameters},
        )
        return run

    return decorate


def refuse_options(context: typer.Context, command: str, owner: str) -> None:
    """Raise UsageError if options of this command precede its subcommand, which would ignore them. owner: what they
    are of."""
    given = [one.opts[-1] for one in context.command.params if was_given(context, one.name or "")]
    if given:
        below = f"disagg {command} {context.invoked_subcommand}"
        message = f"{given[0]} is an option of {owner}, not of `{below}`"
        raise UsageError(message, f"its own options follow it: {below} --help")


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the option of this parameter was on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _use_config(context: typer.Context, value: Path | None) -> None:
    if value is not None:
        context.find_root().obj = replace(settings(context), config=value)


def _use_quiet(context: typer.Context, value: bool) -> None:
    CommandOutput.quiet = CommandOutput.quiet or value


def _options_of_every_command(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="PATH",
            help="The fleet's file. Default: $DISAGG_CONFIG, else ./hosts.toml.",
            expose_value=False,
            callback=_use_config,
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print results and errors only.", expose_value=False, callback=_use_quiet),
    ] = False,
) -> None:
    """Never run: typer makes options of this signature."""


@cache
def params_of(signature: Callable[..., None]) -> Sequence[Any]:
    """The options that typer makes of a function's signature, for commands to share."""
    program = typer.Typer(add_completion=False)
    program.command()(signature)
    return tuple(param for param in typer.main.get_command(program).params if param.name != "help")


def shared_options() -> Sequence[Any]:
    """The options of every command."""
    return params_of(_options_of_every_command)


def model_option(help: str) -> Any:
    """-m or --model, with completion of its value."""
    return typer.Option("-m", "--model", metavar="NAME", help=help, show_default=False, autocompletion=complete_model)


def sampling_option(field: str, metavar: str = "N") -> Any:
    """The option of a field of Sampling. Its help states the range; a value outside it is a usage error."""
    limits = bounds(Sampling, field)
    range_note = f" {limits.text.capitalize()}." if limits.text else ""
    return typer.Option(metavar=metavar, help=limits.description + range_note, callback=within(limits))


def seconds_option(least: float, text: str) -> Any:
    """An option of seconds: from `least` to a day, of which every clock and timer can wait. text: its help."""
    limits = Bounds(least, MAX_DEADLINE_S)
    return typer.Option(metavar="S", help=f"{text} {limits.text.capitalize()}.", callback=within(limits))


def within(limits: Bounds) -> Callable[[Any], Any]:
    """Returns the value of an option, which may be a list or left out. BadParameter if it is not within the limits."""

    def check(value: Any) -> Any:
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(not _within(one, limits) for one in values):
            raise typer.BadParameter(f"{limits.text} (got {value})")
        return value

    return check


def choice_option(choices: Sequence[str], **named: Any) -> Any:
    """An option whose value is one of these, or several if it is a list; typer takes no list of Literals."""

    def check(value: Any) -> Any:
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one not in choices:
                raise typer.BadParameter(f"one of {', '.join(choices)} (got {one})")
        return value

    return typer.Option(callback=check, autocompletion=lambda: list(choices), **named)


def _within(value: float, limits: Bounds) -> bool:
    low, high = limits.minimum, limits.maximum
    above = low is None or value > low or (value == low and not limits.exclusive_minimum)
    return above and (high is None or value <= high)
