"""The bytes that a single token stands for. A character may consist of several tokens, so they need not be text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes a space


def token_bytes(tokenizer: Mapping[str, Any]) -> Callable[[str], bytes]:
    """A function from a token's entry in the vocabulary to its bytes. tokenizer: tokenizer.json."""
    special = {token["content"] for token in tokenizer.get("added_tokens") or ()}
    by_letter = _byte_of_letter() if _is_byte_level(tokenizer.get("decoder")) else None

    def of(token: str) -> bytes:
        if token in special:
            return token.encode()
        if by_letter is not None:
            return b"".join(by_letter.get(letter) or letter.encode() for letter in token)
        if found := _BYTE.fullmatch(token):
            return bytes.fromhex(found[1])
        return token.replace(_SPACE, " ").encode()

    return of


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, Mapping):
        return False
    return decoder.get("type") == "ByteLevel" or any(_is_byte_level(part) for part in decoder.get("decoders") or ())


@cache
def _byte_of_letter() -> Mapping[str, bytes]:
    """GPT-2's alphabet: printable Latin letters stand for themselves, the other bytes for letters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = [*zip(printable, printable, strict=True), *((byte, 256 + index) for index, byte in enumerate(others))]
    return {chr(letter): bytes([byte]) for byte, letter in shown}
