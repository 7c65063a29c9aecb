"""Words in messages and in TOML: the nearest known one, what is safe to show, keys and strings as TOML has them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence


def nearest(word: str, known: Collection[str]) -> str:
    """`did you mean "this"?`, or nothing where nothing is near."""
    spellings = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word[:200].lower(), spellings, n=1)
    return f'did you mean "{spellings[close[0]]}"?' if close else ""


def toml_key(key: str) -> str:
    """A key as TOML writes it: bare where it may be."""
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare or (key and not key.strip("-_")) else toml_string(key)


def toml_string(text: str) -> str:
    """A TOML basic string that reads back as exactly this text. Not for lone surrogates, which TOML cannot hold."""
    signs = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(signs.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'


def printable(text: str) -> str:
    """Text of the user's for a message: nothing that moves a terminal's cursor, and not endless."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean if len(clean) <= 80 else f"{clean[:79]}…"


def one_of(allowed: Sequence[str]) -> str:
    """The allowed words, for a hint."""
    return "one of " + ", ".join(f'"{word}"' for word in allowed)
