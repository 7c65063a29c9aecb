"""Tokens that are pieces of text, and what an Output makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from disagg.engines.model.stream import StopStrings
from disagg.servers.output.part import Output, OutputPart


class Texts:
    """A TextStream of tokens that number the given texts."""

    def __init__(self, texts: Sequence[str], stop: Sequence[str] = ()) -> None:
        self._texts, self._stops = texts, StopStrings(stop)

    @property
    def stopped(self) -> str:
        return self._stops.reached

    def push(self, token: int) -> str:
        return self._stops.push(self._texts[token])

    def finish(self) -> str:
        return self._stops.finish()


def cuts(text: str) -> Iterator[list[str]]:
    """The text as one token, as tokens of one, two and three letters, and cut in two at every position."""
    for length in (len(text), 1, 2, 3):
        yield [text[at : at + length] for at in range(0, len(text), length)]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


def run(output: Output, tokens: Iterable[int]) -> list[OutputPart]:
    """Its parts of these tokens; neighbours of a kind are joined, ids of calls left out."""
    found: list[OutputPart] = []
    for part in [part for token in tokens for part in output.push(token)] + [*output.finish()]:
        if part.call is not None:
            found.append(OutputPart("call", f"{part.call.name} {part.call.arguments}"))
        elif found and found[-1].kind == part.kind:
            found[-1] = OutputPart(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return found
