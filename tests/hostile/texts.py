"""Texts that were made to keep what reads them busy: tokenizers, templates, and parsers of a model's answer.

    for name, text in texts.hostile(1 << 20): ...

`KINDS` are texts by kind, of any size. `CALLS` are what a caller can make a model write between the marks of a tool
call. A new kind of text is one line, and every tokenizer and parser is put under it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def repeated(unit: str) -> Callable[[int], str]:
    """A text of at most so many bytes, of this unit again and again."""
    return lambda size: unit * (size // len(unit.encode()))


def _random(alphabet: str) -> Callable[[int], str]:
    return lambda size: "".join(random.Random(size).choices(alphabet, k=size))


KINDS: Final[Mapping[str, Callable[[int], str]]] = {
    "prose": repeated("the quick brown fox jumps over the lazy dog. "),
    "one letter": repeated("a"),
    "capitals": repeated("A"),
    "digits": repeated("1"),
    "marks": repeated("!"),
    "random letters": _random(LETTERS),
    "words of one letter": repeated("a "),
    "blanks": repeated(" "),
    "blanks and one letter": lambda size: " " * (size - 1) + "x",
    "runs of blanks": repeated(" " * 1000 + "x"),
    "new lines": repeated("\n"),
    "tabs": repeated("\t "),
    "zeros": repeated("\0"),
    "emoji": repeated("\U0001f468\u200d\U0001f469\u200d"),
    "one letter with many accents": lambda size: "a" + "\u0316\u0301\u0327" * (size // 6),
    "ligatures that normalise to 18 letters": repeated("\ufdfa"),
    "Chinese": repeated("\u6f22\u5b57"),
    "special tokens": repeated("<|end|>"),
    "blanks before special tokens": repeated("   <|turn|>"),
    "beginnings of special tokens": repeated("<|en"),
}

CALLS: Final[Mapping[str, Callable[[int], str]]] = {
    "open angles": repeated("<"),
    "keys without values": repeated("<arg_key>"),
    "values without ends": repeated("f<arg_key>a</arg_key><arg_value>"),
    "functions without ends": repeated("<function="),
    "parameters without ends": lambda size: "<function=f>" + "<parameter=a>" * (size // 13) + "</function>",
    "invocations without ends": repeated('<invoke name="a">'),
    "calls without ends": repeated("call:f{"),
    "calls in lists": repeated("[f("),
    "lists in lists": repeated("["),
    "objects in objects": repeated('{"a":'),
    "quotes": repeated('"'),
    "backslashes": repeated("\\"),
    "escapes": repeated("<escape>"),
    "blanks": repeated(" "),
    "many members": lambda size: (
        '{"name":"f","arguments":{"a":0' + "".join(f',"{n}":1' for n in range(size // 12)) + "}}"
    ),
}


def hostile(size: int) -> Iterator[tuple[str, str]]:
    """A text of each kind, with its name."""
    for name, make in KINDS.items():
        yield name, make(size)
