"""The `disagg` program: runs one command line, and makes of what goes wrong one message and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Final

import typer

from disagg.cli.common.completion import VARIABLE, names_with_colons
from disagg.cli.common.context import CommandOutput, note_interrupt, print_error, print_json
from disagg.cli.common.process import INTERRUPTED, open_closed_streams, replace_what_has_no_code, terminating
from disagg.cli.program import Program
from disagg.errors import Cancelled, DisaggError, UsageError, clipped
from disagg.extras import explained
from disagg.version import VERSION

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing to an open file whose device is full. An error of opening a file also has its name."""
_CLOSED_PIPE = 128 + signal.SIGPIPE
"""What a shell reports of a program such as `yes | head` whose reader has closed the pipe."""
_INSTALL = "--install-completion"
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError, which typer does not export: newer versions of typer contain click, older ones import it."""

app = typer.Typer(
    name="disagg",
    cls=Program,
    help="Run LLMs as one server on NVIDIA machines, which do prefill, and Apple machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_OURS: Final = (
    (r"Input should be a valid integer.*", "a whole number"),
    (r"Input should be a valid number.*", "a number"),
    (r"Input should be less than or equal to (.*)", r"at most \1"),
    (r"Input should be greater than or equal to (.*)", r"at least \1"),
    (r"Input should be less than (.*)", r"under \1"),
    (r"Input should be greater than (.*)", r"over \1"),
    (r"Value error, '.*?' is not one of (.*?)\.?", r"one of \1"),
    (r"Input should be (.*)", r"\1"),
    (r"Value error, (.*)", r"\1"),
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disagg {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of `disagg` itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit with 0 or the error's exit code. An error is one message on stderr."""
    open_closed_streams()
    replace_what_has_no_code()
    # A second Ctrl-C interrupts asyncio's clean-up, which would log the tasks it cancels with their tracebacks.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    CommandOutput.quiet = CommandOutput.printed_json = CommandOutput.noted_interrupt = False
    with terminating():
        sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: Sequence[str]) -> int:
    try:
        code = invoke(arguments)
        sys.stdout.flush()
        return code
    except DisaggError as error:
        return _report(error, arguments)
    except KeyboardInterrupt:
        note_interrupt("interrupted")
        _report_json(Cancelled("interrupted"), arguments)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        _discard_stdout()
        return _CLOSED_PIPE
    except SystemExit as end:  # rich's answer to a closed pipe, in which typer prints help texts
        if isinstance(end.__context__, BrokenPipeError):
            return _CLOSED_PIPE
        raise
    except OSError as error:
        return _report_system_error(error, arguments)


def _report_system_error(error: OSError, arguments: Sequence[str]) -> int:
    """The exit code of an error of a path that was given, or of the output. Raises any other, which is a fault."""
    if error.errno == errno.ENAMETOOLONG and error.filename is not None:
        return _report(UsageError(f"{clipped(error.filename)}: {error.strerror}", "name a shorter path"), arguments)
    if _INSTALL in arguments and error.filename is not None:
        reason = f"cannot write the completion to {clipped(error.filename)}: {error.strerror}"
        return _report(DisaggError(reason, "--show-completion prints it"), arguments)
    if error.errno not in _NO_SPACE or error.filename is not None:
        raise error
    _discard_stdout()
    reason = f"cannot write the output: {error.strerror}"
    return _report(DisaggError(reason, "free space on the device that stdout is redirected to"), ())


def invoke(arguments: Sequence[str]) -> int:
    """Run the command; its exit code. Raises DisaggError, also for a command line that is wrong."""
    command = _parser()
    try:
        if VARIABLE in os.environ:
            with names_with_colons():
                command(list(arguments), prog_name="disagg")
        with command.make_context("disagg", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return INTERRUPTED
    except _CommandLineError as error:
        return _explain(error)
    except ModuleNotFoundError as error:
        raise explained(error) from None
    return 0


@cache
def _parser() -> Any:
    """The group of all commands, each built when it is first called."""
    return typer.main.get_command(app)


def _explain(error: Any) -> int:
    """Raise the UsageError that says what is wrong with the command line; only print the help if there was no word."""
    path = error.ctx.command_path if error.ctx is not None else "disagg"
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    raise UsageError(usage_message(error), f"see `{path} --help`")


def _report(error: DisaggError, arguments: Sequence[str]) -> int:
    print_error(error)
    _report_json(error, arguments)
    return error.exit_code


def _report_json(error: DisaggError, arguments: Sequence[str]) -> None:
    """With --json, print the error as the one object on stdout, unless the command has printed its own."""
    if wants_json(arguments) and not CommandOutput.printed_json:
        print_json({"error": error.to_json()})


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether this command line asks for JSON on stdout."""
    return "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)


def _discard_stdout() -> None:
    """Write nothing more to stdout, including what the interpreter would flush at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usage_message(error: Any) -> str:
    """The message of click's UsageError: `--port: at most 65535 (got 99999)`, `no such option: --nope`."""
    match = re.fullmatch(r"Invalid value for (.*?): (.*)", error.format_message(), re.DOTALL)
    if match is None:
        message = " ".join(str(error.format_message()).split())
        return message[:1].lower() + message[1:].rstrip(".")
    option, reason = match[1].replace("'", ""), match[2]
    for theirs, ours in _OURS:
        if found := re.fullmatch(theirs, reason, re.DOTALL):
            return f"{option}: {found.expand(ours).replace(chr(39), '')}{_given(error)}"
    return f"{option}: {reason.rstrip('.')}"


def _given(error: Any) -> str:
    """The value that was refused, if typer kept pydantic's error."""
    faults: list[Any] = getattr(error.__cause__, "errors", list)()
    return f" (got {faults[0]['input']})" if faults else ""
