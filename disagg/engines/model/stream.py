"""Token ids to text as they arrive: whole characters only, and never past a stop string; and the bytes of one token,
which need not be text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder returns for the bytes of an incomplete character

# A character has at most four bytes and a token at least one, so an incomplete character lies in the last three tokens.
# Longer runs of undecodable bytes are noise: they are held for this many tokens, then returned.
MAX_HELD_TOKENS = 16
INCOMPLETE_TOKENS = 3
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes a space


class DetokenizedStream:
    """A TextStream on tokenizers' DecodeStream, for one answer.

    DecodeStream has no flush, holds undecodable bytes without a bound, and with byte fallback raises if a byte that
    forms no character changes how the bytes before it are decoded. In these cases the held tokens are decoded here,
    until their text ends with a whole character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        hidden: frozenset[int] = frozenset(),
        stops: StopStrings | None = None,
        after: int = 0,
        marks: bool = False,
    ) -> None:
        """hidden: tokens without text (end of sequence). stops: strings that end the answer, which are looked for
        after so many tokens. marks: special tokens have their text."""
        self._skip = not marks
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decoder: DecodeStream | None = DecodeStream(
            skip_special_tokens=self._skip
        )  # None after undecodable bytes
        self._context: list[int] = []  # the tokens of the last text: the next text may depend on them (leading spaces)
        self._held: list[int] = []  # tokens whose text is not certain yet
        self._stops = stops or StopStrings(())
        self._unstopped = after

    @property
    def stopped(self) -> str:
        return self._stops.reached

    def push(self, token: int) -> str:
        if self.stopped or token in self._hidden:
            return ""
        self._unstopped -= 1
        self._held.append(token)
        if text := self._decoded(token):
            return self._release(text, len(self._held))
        if len(self._held) < MAX_HELD_TOKENS:
            return ""
        self._decoder = None
        return self._flush(len(self._held) - INCOMPLETE_TOKENS)

    def finish(self) -> str:
        return "" if self.stopped else self._flush(len(self._held)) + self._stops.finish()

    def _decoded(self, token: int) -> str:
        """The text of the held tokens, of which `token` is the last; "" while it is not certain."""
        if self._decoder is not None:
            try:
                return self._decoder.step(self._tokenizer, token) or ""
            except Exception:  # noqa: BLE001 - tokenizers raises Exception itself: "Invalid prefix encountered"
                self._decoder = None
        text = self._text(len(self._held))
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._decoder = DecodeStream(ids=self._held, skip_special_tokens=self._skip)
        return text

    def _flush(self, count: int) -> str:
        return self._release(self._text(count), count)

    def _text(self, count: int) -> str:
        """The text that the first `count` held tokens add to that of the context."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip)
        text = self._tokenizer.decode(self._context + self._held[:count], skip_special_tokens=self._skip)
        return str(text[len(before) :])

    def _release(self, text: str, count: int) -> str:
        if text:
            self._context = self._held[:count]
        self._held = self._held[count:]
        return text if self._unstopped >= 0 else self._stops.push(text)


class StopStrings:
    """Passes text through until one of `stops` occurs; holds back what may be the beginning of one.

    reached: the stop string that occurred first, "" until then.
    """

    def __init__(self, stops: Sequence[str], *, kept: bool = False) -> None:
        """kept: the stop string is part of the text."""
        self._kept = kept
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=1) - 1
        self._beginnings = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        self._held = ""
        self.reached = ""

    def push(self, text: str) -> str:
        """The part of the text, not returned before, that is now certain to precede any stop string."""
        if self.reached:
            return ""
        self._held += text
        starts = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if starts:
            start, self.reached = min(starts)
            return self._release(start + (len(self.reached) if self._kept else 0))
        return self._release(len(self._held) - self._prefix_length())

    def finish(self) -> str:
        """The text held back, at the end of the text."""
        return "" if self.reached else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _prefix_length(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        ends = range(min(self._longest, len(self._held)), 0, -1)
        return next((length for length in ends if self._held[-length:] in self._beginnings), 0)


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
