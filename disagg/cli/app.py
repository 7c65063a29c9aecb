"""The `disagg` command. Frameworks, SSH and HTTP are imported by the commands that need them, when they run."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from disagg.cli import bench, demo, generate, init, plan_capacity, verify
from disagg.cli.context import Settings, complain
from disagg.cli.fleet import deploy, doctor, lifecycle, logs, models, remote, status, trust
from disagg.cli.signals import terminating
from disagg.errors import DisaggError
from disagg.version import VERSION

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing to an open file fails with where it takes no more. Opening one also tells its name."""

app = typer.Typer(
    name="disagg",
    help="One LLM server from machines of different makes: NVIDIA prefills, Apple decodes, the KV cache crosses.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # fills the paragraphs of help texts; otherwise they break where the source does
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disagg {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="PATH", help="The fleet's file; without it $DISAGG_CONFIG, then ./hosts.toml."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""
    context.obj = Settings(config)


# In the order in which a newcomer meets them.
_USE, _SET_UP, _OPERATE = "Use", "Set up a fleet", "Operate it"
app.command(rich_help_panel=_USE)(demo.demo)
app.command(rich_help_panel=_USE)(generate.generate)
app.command(rich_help_panel=_USE)(verify.verify)
app.add_typer(bench.app, rich_help_panel=_USE)
app.command("plan-capacity", rich_help_panel=_USE)(plan_capacity.plan_capacity)
app.command(rich_help_panel=_SET_UP)(init.init)
app.command(rich_help_panel=_SET_UP)(trust.trust)
app.command(rich_help_panel=_SET_UP)(deploy.plan)
app.command(rich_help_panel=_SET_UP)(deploy.deploy)
app.add_typer(models.models, rich_help_panel=_SET_UP)
app.command(rich_help_panel=_SET_UP)(deploy.rollback)
app.command(rich_help_panel=_SET_UP)(deploy.uninstall)
app.command(rich_help_panel=_OPERATE)(lifecycle.start)
app.command(rich_help_panel=_OPERATE)(status.status)
app.command(rich_help_panel=_OPERATE)(doctor.doctor)
app.command(rich_help_panel=_OPERATE)(logs.logs)
app.command(rich_help_panel=_OPERATE)(lifecycle.restart)
app.command(rich_help_panel=_OPERATE)(lifecycle.stop)
app.command(rich_help_panel=_OPERATE)(remote.ssh)
app.command("exec", rich_help_panel=_OPERATE)(remote.exec_)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit: 0, or the error's own code. Errors are one message on stderr."""
    # A second Ctrl-C lands in asyncio's clean-up, which would log the tasks it tore down with their tracebacks.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with terminating():
        _run(sys.argv[1:] if arguments is None else arguments)


def _run(arguments: Sequence[str]) -> None:
    try:
        app(args=list(arguments), prog_name="disagg")
    except DisaggError as error:
        _fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        _silence_stdout()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _silence_stdout()
        _fail(DisaggError(f"cannot write the output: {error.strerror}", "make room where it is redirected to"))


def _fail(error: DisaggError) -> NoReturn:
    complain(error)
    sys.exit(error.exit_code)


def _silence_stdout() -> None:
    """Nothing more is written to stdout, also not what is left in its buffer when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
