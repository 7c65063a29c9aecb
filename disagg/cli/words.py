"""What the words of a command line mean: which models are asked, and where the prompt comes from."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from disagg.api.requests import body_limit
from disagg.errors import UnknownModel, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.config import Fleet

_CHUNK: Final = 1 << 18  # bytes
_EXAMPLE = 'disagg generate -m NAME "text to continue"'


def parse_words(
    fleet: Fleet, words: Sequence[str], named: Sequence[str], *, has_file: bool
) -> tuple[list[str], str | None]:
    """The models and the prompt of `disagg generate [-m NAME]... [MODEL] [PROMPT]`: None if it is read from a file, "-"
    if from stdin.

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
    if named and len(rest) == 2 and is_model(fleet, rest[0]):
        message = f"the model is given twice: {rest[0]} and -m {named[0]}"
        raise UsageError(message, "leave out one; several models are asked with -m before each")
    if twice := _same_model(fleet, named):
        raise UsageError(f"the model is given twice: {twice}", "leave out one")
    if len(rest) > 1:
        raise UsageError(f"{len(words)} arguments: the prompt is one", f"quote it: {_EXAMPLE}")
    if not rest and not has_file and not piped:
        raise UsageError("there is no prompt", f"{_EXAMPLE}, or pipe it in, or -f FILE")
    prompt = rest[0] if rest else None if has_file else "-"
    return choose_models(fleet, named), prompt


def _same_model(fleet: Fleet, named: Sequence[str]) -> str:
    """`-m a -m b` if both are names of one model; else empty. Raises UnknownModel."""
    first: dict[str, str] = {}
    for word in named:
        model = fleet.model(word).name
        if model in first:
            return f"-m {first[model]} -m {word}"
        first[model] = word
    return ""


def is_model(fleet: Fleet, word: str) -> bool:
    """Whether the word is the name or an alias of one of the fleet's models."""
    try:
        fleet.model(word)
    except UnknownModel:
        return False
    return True


def read_prompt(prompt: str | None, file: Path | None, context: int, example: str = _EXAMPLE) -> str:
    """The prompt: the argument, or the text of the file, or of stdin for "-". UsageError if it cannot be read, if it
    is empty or larger than any request for `context` tokens, or if there are two. example: a command with a prompt."""
    if prompt is not None and file is not None:
        raise UsageError("there are two prompts: an argument and --file", "leave out one of them")
    try:
        if file is not None:
            source = str(file)
            with file.open("rb") as opened:
                text = _read(opened, source, body_limit(context)).replace("\r\n", "\n")
        elif prompt == "-":
            source, text = "stdin", _read(sys.stdin.buffer, "stdin", body_limit(context))
        else:
            source, text = "", prompt or ""
    except OSError as error:
        raise UsageError(f"cannot read the prompt from {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt from {file or 'stdin'} is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    if not text.strip():
        raise UsageError(f"the prompt{f' from {source}' if source else ''} is empty", example)
    return text


def _read(stream: BinaryIO, source: str, limit: int) -> str:
    """The UTF-8 text of the stream. Read in chunks: a signal that comes meanwhile takes effect between two. UsageError
    if it is over `limit` bytes; no more than one chunk beyond is read."""
    read = bytearray()
    while chunk := stream.read(_CHUNK):
        read += chunk
        if len(read) > limit:
            raise UsageError(
                f"the prompt from {source} is over {limit / 2**20:g} MiB, more than a request may have",
                "shorten it, or raise `context` of the model in hosts.toml",
            )
    return read.decode("utf-8")


def choose_models(fleet: Fleet, names: Sequence[str], hint: str = f"name one: {_EXAMPLE}") -> list[str]:
    """The named models by canonical name, each once; the fleet's only model if none is named. UsageError with this
    hint if the fleet has several."""
    if names:
        return list(dict.fromkeys(fleet.model(name).name for name in names))
    if len(fleet.models) == 1:
        return list(fleet.models)
    raise UsageError(f"which model? {fleet.path.name} has {', '.join(fleet.models)}", hint)
