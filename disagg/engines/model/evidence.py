"""What a loaded engine finds likeliest after a fixed text: evidence that two hosts compute a model alike, whatever is
known about models of its type.

The text is disagg's own source code, the same on hosts that run the same disagg.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from disagg.api.layout import Layout
from disagg.api.status import Evidence
from disagg.engines.model.text import PromptTokenizer
from disagg.kv.fingerprint import token_hash

PLACES: Final = 16
LEAST_TOKENS: Final = 256
MOST_BYTES: Final = 1 << 30
"""The most KV that a prompt of more than LEAST_TOKENS may take."""
CHARACTERS: Final = 8
"""Characters of text for each token: more than any tokenizer puts into one on average."""

# (tokens, last) -> the likeliest next token after each of the last `last` tokens.
Likeliest = Callable[[Sequence[int], int], Sequence[int]]


def gather(tokenizer: PromptTokenizer, layout: Layout, context: int, likeliest: Likeliest) -> Evidence:
    """The evidence of an engine that serves `context` tokens."""
    length = prompt_length(layout, context)
    tokens = tokenizer.encode(_text()[: CHARACTERS * length])[:length]
    found = likeliest(tokens, min(PLACES, len(tokens)))
    return Evidence(token_hash(tokens)[:16], len(tokens), tuple(int(token) for token in found))


def prompt_length(layout: Layout, context: int) -> int:
    """Tokens of the prompt, the same on all hosts of a model: more than the longest window has, unless the KV of so
    many is over MOST_BYTES."""
    beyond = LEAST_TOKENS + max((layer.window or 0 for layer in layout.layers), default=0)
    wanted = beyond if layout.nbytes(beyond) <= MOST_BYTES else LEAST_TOKENS
    return max(1, min(wanted, context - 1))


@cache
def _text() -> str:
    package = Path(__file__).parents[2]
    files = [package / "errors.py", *sorted((package / "api").glob("*.py")), *sorted((package / "kv").glob("*.py"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
