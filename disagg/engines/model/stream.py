"""Token ids to text while they arrive: whole characters only, and never past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for the bytes of an incomplete character

# A character has at most four bytes and a token at least one, so an incomplete character lies in the last three
# tokens. Longer runs of undecodable bytes are noise; they are held for this many tokens, then shown as they are.
MAX_HELD_TOKENS = 16
INCOMPLETE_TOKENS = 3


class DetokenizedStream:
    """A TextStream over `decode`, which turns a run of ids into text. One per answer; not for sharing."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, hidden: frozenset[int] = frozenset(), stop: Sequence[str] = ()
    ) -> None:
        """hidden: tokens that never show (end of sequence). stop: strings that end the answer."""
        self._decode = decode
        self._hidden = hidden
        self._shown: list[int] = []  # the last tokens that showed: what follows may depend on them (leading spaces)
        self._pending: list[int] = []  # tokens whose text is not certain yet
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """See TextStream."""
        return self._stops.met

    def push(self, token: int) -> str:
        """See TextStream."""
        if self.stopped or token in self._hidden:
            return ""
        self._pending.append(token)
        text = self._text(len(self._pending))
        if text and not text.endswith(REPLACEMENT):
            return self._show(text, len(self._pending))
        if len(self._pending) < MAX_HELD_TOKENS:
            return ""
        certain = len(self._pending) - INCOMPLETE_TOKENS
        return self._show(self._text(certain), certain)

    def finish(self) -> str:
        """See TextStream."""
        if self.stopped:
            return ""
        rest = self._show(self._text(len(self._pending)), len(self._pending))
        return rest + self._stops.finish()

    def _text(self, count: int) -> str:
        """What the first `count` pending tokens add to the text."""
        before = self._decode(self._shown)
        return self._decode(self._shown + self._pending[:count])[len(before) :]

    def _show(self, text: str, count: int) -> str:
        if text:
            self._shown = self._pending[:count]
        self._pending = self._pending[count:]
        return self._stops.push(text)


class StopStrings:
    """Passes text through until one of `stops` occurs; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.met = False

    def push(self, text: str) -> str:
        """The part of all text so far that is now certain to come before any stop, and was not returned yet."""
        if self.met:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.met = True
            return self._release(min(found))
        return self._release(len(self._held) - self._possible_beginning())

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        return "" if self.met else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in ends if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)
