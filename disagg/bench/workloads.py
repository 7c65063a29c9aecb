"""The requests to send: random token ids of exact counts, the texts of a file, or a trace with shared prefixes.

Token ids differ between modes, so that no cache filled by one mode helps another. Sizes of files are bounded; an error
in one is a ConfigError with file, line and column.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from disagg.api.sampling import MAX_TOKENS
from disagg.bench import MAX_REQUESTS, Mode
from disagg.bench.plan import Point
from disagg.config.document import fault
from disagg.errors import ConfigError, UsageError

BLOCK_TOKENS = 512  # of one hash id in a Mooncake trace
MAX_FILE_BYTES = 1 << 30
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkloadItem:
    """One request: exactly one of `text` and `tokens`. The servers count the tokens of a text."""

    output_tokens: int
    text: str | None = None
    tokens: tuple[int, ...] | None = None

    def request(self) -> dict[str, Any]:
        """Keyword arguments of AsyncClient.stream. End of sequence is ignored, so that the output count is exact."""
        prompt = {"prompt": self.text} if self.tokens is None else {"tokens": self.tokens}
        return {**prompt, "max_tokens": self.output_tokens, "ignore_eos": True}


class Workload(Protocol):
    """A source of items."""

    @property
    def label(self) -> str:
        """A description for reports."""

    @property
    def times(self) -> Sequence[float]:
        """Its own arrival times in seconds; empty if it has none."""

    def item(self, point: Point, mode: Mode, index: int) -> WorkloadItem:
        """The request with this number, the same for the same arguments."""


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Uniformly random ids below `vocab_size`, `prompt_tokens` of the point; no two requests share a prefix."""

    vocab_size: int
    seed: int = 0
    times: Sequence[float] = ()
    label: str = "random token ids"

    def item(self, point: Point, mode: Mode, index: int) -> WorkloadItem:
        assert point.prompt_tokens is not None and point.output_tokens is not None
        key = f"{self.seed}/{mode}/{point.prompt_tokens}/{point.output_tokens}/{point.load.label}/{index}"
        return WorkloadItem(point.output_tokens, tokens=_ids(key, point.prompt_tokens, self.vocab_size))


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in a cycle. The length of an answer is the item's, else the point's."""

    items: Sequence[TextItem]
    label: str
    times: Sequence[float] = ()

    def item(self, point: Point, mode: Mode, index: int) -> WorkloadItem:
        chosen = self.items[index % len(self.items)]
        output = chosen.output_tokens or point.output_tokens
        assert output is not None
        return WorkloadItem(output, text=chosen.prompt)


@dataclass(frozen=True, slots=True)
class LengthTrace:
    """A trace's lengths and times; blocks with equal hash ids get equal tokens."""

    rows: Sequence[TraceRow]
    vocab_size: int
    label: str
    seed: int = 0
    times: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(row.timestamp / 1e3 for row in self.rows))

    def item(self, point: Point, mode: Mode, index: int) -> WorkloadItem:
        row = self.rows[index % len(self.rows)]
        tokens: list[int] = []
        for block in row.hash_ids:
            tokens += _ids(f"{self.seed}/{mode}/block/{block}", BLOCK_TOKENS, self.vocab_size)
        return WorkloadItem(row.output_length, tokens=tuple(tokens[: row.input_length]))


def _ids(key: str, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(random.Random(key).choices(range(vocab_size), k=count))


@dataclass(frozen=True, slots=True)
class TextItem:
    """A prompt, and the length of its answer if the file states it."""

    prompt: str
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `timestamp`: milliseconds. `hash_ids`: one per block of BLOCK_TOKENS prompt tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_prompts(path: Path, limit: int = MAX_REQUESTS) -> list[TextItem]:
    """`.jsonl`: one `{"prompt": text, "output_tokens": n}` per line, n optional. Any other file is one prompt."""
    text = _read(path)
    if path.suffix != ".jsonl":
        if not text.strip():
            raise ConfigError(f"{path} is empty", "write a prompt into it")
        return [TextItem(text)]
    items = []
    for start, line in _lines(text, limit):
        span = _FileSpan(path, text, start, start + len(line))
        body = span.object(line)
        span.only(body, ("prompt", "output_tokens"))
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            span.refuse('there is no "prompt"', 'each line reads {"prompt": "some text"}')
        output = span.count(body, "output_tokens") if "output_tokens" in body else None
        items.append(TextItem(prompt, output))
    return _some(items, path)


def read_sharegpt(path: Path, limit: int = MAX_REQUESTS) -> list[TextItem]:
    """`[{"conversations": [{"from": "human", "value": text}, {"from": "gpt", ...}, ...]}, ...]`: first human turns.

    Conversations that do not begin with an answered human turn are skipped, as is usual for this format.
    """
    text = _read(path)
    items: list[TextItem] = []
    for span, body in _array(path, text):
        conversation = body.get("conversations", body.get("conversation")) if isinstance(body, dict) else None
        if not isinstance(conversation, list):
            span.refuse('this is not an object with a list of "conversations"', "is the file in ShareGPT format?")
        if not all(isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in conversation):
            span.refuse('each turn of a conversation reads {"from": "human", "value": "text"}')
        opens = len(conversation) >= 2 and conversation[0].get("from") in ("human", "user")
        if opens and (prompt := str(conversation[0]["value"])).strip():
            items.append(TextItem(prompt))
        if len(items) == limit:
            break
    return _some(items, path)


def read_mooncake(path: Path, limit: int = MAX_REQUESTS) -> list[TraceRow]:
    """`{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}` a line, in order of time."""
    text, rows = _read(path), list[TraceRow]()
    for start, line in _lines(text, limit):
        span = _FileSpan(path, text, start, start + len(line))
        body = span.object(line)
        timestamp, ids = body.get("timestamp"), body.get("hash_ids")
        if not isinstance(timestamp, int | float) or isinstance(timestamp, bool) or not 0 <= timestamp < 1e15:
            span.refuse('"timestamp" is missing or not a time in milliseconds')
        if rows and timestamp < rows[-1].timestamp:
            span.refuse(f"timestamp {timestamp:g} is before the {rows[-1].timestamp:g} above it", "sort the trace")
        if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
            span.refuse('"hash_ids" is missing or not a list of whole numbers')
        length = span.count(body, "input_length")
        if len(ids) != -(-length // BLOCK_TOKENS):
            span.refuse(
                f"{len(ids)} hash_ids do not cover {length} input tokens",
                f"there is one per block of {BLOCK_TOKENS} tokens: {-(-length // BLOCK_TOKENS)}",
            )
        rows.append(TraceRow(timestamp, length, span.count(body, "output_length"), tuple(ids)))
    return _some(rows, path)


@dataclass(frozen=True, slots=True)
class _FileSpan:
    """The characters [start, end) of a file, which hold one item."""

    path: Path
    text: str
    start: int
    end: int

    def refuse(self, message: str, hint: str = "") -> NoReturn:
        raise fault(str(self.path), self.text, (self.start, self.end), message, hint)

    def object(self, line: str) -> dict[str, Any]:
        try:
            body = json.loads(line)
        except json.JSONDecodeError as error:
            at = self.start + error.pos
            raise fault(str(self.path), self.text, (at, at + 1), f"this is not JSON: {error.msg}") from None
        except RecursionError:
            self.refuse("this JSON is nested too deeply")
        if not isinstance(body, dict):
            self.refuse("this is not a JSON object")
        return body

    def only(self, body: dict[str, Any], known: tuple[str, ...]) -> None:
        if unknown := [key for key in body if key not in known]:
            self.refuse(f'unknown key "{unknown[0]}"', f"known: {', '.join(known)}")

    def count(self, body: dict[str, Any], key: str) -> int:
        value = body.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
            self.refuse(f'"{key}" is missing or not a whole number from 1 to {MAX_TOKENS}')
        return value


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:  # a device or a pipe has no size
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise UsageError(f"{path} is over {MAX_FILE_BYTES >> 20} MiB", "use a part of it")
        return content.decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error


def _lines(text: str, limit: int) -> Iterator[tuple[int, str]]:
    """(offset, line) of the first `limit` lines that are not blank."""
    start = count = 0
    while start < len(text) and count < limit:
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        if text[start:end].strip():
            count += 1
            yield start, text[start:end]
        start = end + 1


def _array(path: Path, text: str) -> Iterator[tuple[_FileSpan, Any]]:
    """The elements of the file's JSON array, read one by one to keep the position of each."""
    decoder, at = json.JSONDecoder(), _after_blanks(text, 0)
    if text[at : at + 1] != "[":
        _FileSpan(path, text, at, at + 1).refuse("the file does not begin with [", "ShareGPT format is one JSON array")
    at = _after_blanks(text, at + 1)
    while text[at : at + 1] != "]":
        try:
            body, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise fault(str(path), text, (error.pos, error.pos + 1), f"this is not JSON: {error.msg}") from None
        except RecursionError:
            _FileSpan(path, text, at, at + 1).refuse("this JSON is nested too deeply")
        yield _FileSpan(path, text, at, end), body
        at = _after_blanks(text, end)
        if text[at : at + 1] == ",":
            at = _after_blanks(text, at + 1)
        elif text[at : at + 1] != "]":
            _FileSpan(path, text, at, at + 1).refuse("expected , or ] after an element of the array")


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _some(items: list[T], path: Path) -> list[T]:
    if not items:
        raise ConfigError(f"{path} holds no request", "see docs/benchmarking.md for the file formats")
    return items
