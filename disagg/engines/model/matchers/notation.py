"""Grammars as their callers write them: in Lark's notation, or in GBNF, which llama.cpp and xgrammar read."""

from __future__ import annotations

import json
import re
from typing import Final

ANY_NOTATION: Final = "%grammar"
"""Before a grammar, as a string of JSON, in the rule that is to be this grammar."""
NOT_READ: Final = "neither Lark nor GBNF"
_NESTED: Final = re.compile(rf'^(\w+): {ANY_NOTATION} (".*")$', re.MULTILINE)


def in_lark(text: str) -> str | None:
    """The text with a grammar in it as llguidance nests it; None if its notation is neither. Takes time: for the
    process of a form."""
    from llguidance.gbnf_to_lark import any_to_lark

    found = _NESTED.search(text)
    if found is None:
        return text
    try:
        grammar = any_to_lark(json.loads(found[2]))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - its parser raises any, with text of the grammar
        return None
    return f"{text[: found.start()]}{found[1]}: %lark {{\n{grammar}\n}}{text[found.end() :]}"
