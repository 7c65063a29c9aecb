"""The options of every command that acts on hosts: which hosts, how many at the same time, how long for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from disagg.api.base import Bounds
from disagg.api.requests import MAX_DEADLINE_S
from disagg.cli.common.completion import complete_group, complete_host, complete_model, complete_role
from disagg.cli.common.context import settings
from disagg.cli.common.options import Command, params_of, shared_options, within

_SELECTS: Final = {
    "only_hosts": "names",
    "only_role": "role",
    "only_model": "model",
    "only_groups": "groups",
    "not_hosts": "exclude",
}
"""Parameters of the options -> arguments of Fleet.select. Commands have arguments called `host` and `model`."""
_Names = list[str] | None
_HOST_S: Final = Bounds(0.1, MAX_DEADLINE_S)


class FanOutCommand(Command):
    """A command that works on all its hosts at the same time: --parallel, and --timeout unless it has one itself."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        own = {option for param in self.params for option in param.opts}
        self._insert([param for param in params_of(_options_of_work_on_many_hosts) if own.isdisjoint(param.opts)])

    def _insert(self, options: Sequence[Any]) -> None:
        """Before those of every command."""
        at = len(self.params) - len(shared_options())
        self.params[at:at] = options

    def invoke(self, ctx: Any) -> Any:
        from disagg.fleet.machine.fan_out import FanOutLimits, limited

        with limited(FanOutLimits(settings(ctx).parallel, settings(ctx).host_s)):
            return super().invoke(ctx)


class HostCommand(FanOutCommand):
    """A command that also takes the options that select hosts, the same for all of them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._insert(params_of(_options_that_select_hosts))


def _select(context: typer.Context, param: typer.CallbackParam, value: Any) -> None:
    if value:
        chosen = settings(context)
        context.find_root().obj = replace(chosen, selection={**chosen.selection, _SELECTS[str(param.name)]: value})


def _selector(*names: str, metavar: str = "NAME", help: str, autocompletion: Callable[..., Any]) -> Any:
    return typer.Option(
        *names,
        metavar=metavar,
        help=help,
        show_default=False,
        autocompletion=autocompletion,
        expose_value=False,
        callback=_select,
    )


_ONLY_HOST = _selector(
    "--host", help="Only this host, or hosts such as 'mac-*'; repeatable.", autocompletion=complete_host
)
_ONLY_ROLE = _selector("--role", metavar="ROLE", help="Only hosts with this role.", autocompletion=complete_role)
_ONLY_MODEL = _selector("--model", "-m", help="Only hosts of this model.", autocompletion=complete_model)
_ONLY_GROUP = _selector(
    "--group", help="Only hosts of this group of hosts.toml; repeatable.", autocompletion=complete_group
)
_NOT_HOST = _selector(
    "--exclude", help="Not this host, or hosts such as 'mac-*'; repeatable.", autocompletion=complete_host
)


def _options_that_select_hosts(
    only_hosts: Annotated[_Names, _ONLY_HOST] = None,
    only_role: Annotated[str | None, _ONLY_ROLE] = None,
    only_model: Annotated[str | None, _ONLY_MODEL] = None,
    only_groups: Annotated[_Names, _ONLY_GROUP] = None,
    not_hosts: Annotated[_Names, _NOT_HOST] = None,
) -> None:
    """Never run: typer makes options of this signature."""


def _limit(context: typer.Context, param: typer.CallbackParam, value: Any) -> None:
    if value is not None:
        chosen = settings(context)
        context.find_root().obj = replace(chosen, **{str(param.name): value})


def _limit_s(context: typer.Context, param: typer.CallbackParam, value: float | None) -> None:
    _limit(context, param, within(_HOST_S)(value))


def _options_of_work_on_many_hosts(
    parallel: Annotated[
        int | None,
        typer.Option(
            "--parallel",
            min=1,
            metavar="N",
            help="On at most so many hosts at the same time. Default: 32.",
            show_default=False,
            expose_value=False,
            callback=_limit,
        ),
    ] = None,
    host_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="S",
            help="Seconds for the work on one host, which is then interrupted: "
            f"{_HOST_S.text}. Default: each step has its own limit.",
            show_default=False,
            expose_value=False,
            callback=_limit_s,
        ),
    ] = None,
) -> None:
    """Never run: typer makes options of this signature."""
