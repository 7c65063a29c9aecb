"""Whether what a host sends fits the request and itself. Pure.

A host is not believed: what does not fit ends the attempt with InvalidAnswer, and another host goes on after what was
delivered. What only the model knows, such as whether a token is the right one, is not found here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from disagg.api.events import DoneEvent, Event, LocalEvent, ShippedEvent, SlotEvent, TokensEvent
from disagg.api.names import KV_CHUNKS
from disagg.errors import InvalidAnswer

TOKEN_CHARS: Final = 1024
"""Characters of text per token, on average; the longest tokens of known vocabularies, blanks, have a few hundred."""
MORE_CHARS: Final = 1 << 16
"""Beyond these, for what a host holds back and sends with a later token."""
MAX_SLOTS: Final = 2
AUDITS: Final = 2
"""How often a token may run for an audit."""
_HINT: Final = "run `disagg verify` and look at the host's log: it is broken, or another program has its port"


@dataclass(slots=True)
class AnswerBounds:
    """What one attempt may send, and what it has sent. prompt_tokens: as the slot of this attempt states them, or the
    caller if it sent tokens; 0 if not known. vocab_size: the model's, 0 if not known. given: tokens of the answer that
    the host got with the request. stops: the stop strings that were asked for. begun: it has sent a slot, or tokens.
    goes_on: the prefill host may fail in mid-prompt, and the answer goes on all the same. slots: that were opened.
    """

    host: str
    max_tokens: int
    vocab_size: int = 0
    given: int = 0
    stops: Collection[str] = ()
    prompt_tokens: int = 0
    tokens: int = 0
    chars: int = 0
    called: bool = False
    begun: bool = False
    goes_on: bool = False
    slots: int = 0

    def require_fits(self, event: Event) -> None:
        """Raises InvalidAnswer if this event does not fit those before it."""
        if isinstance(event, TokensEvent):
            self.take(event)
        elif isinstance(event, SlotEvent | LocalEvent):
            self.slot(event)
        elif isinstance(event, DoneEvent):
            self.end(event)
        else:
            raise self._invalid(f"it sent an event {event.event!r} in the answer")

    def slot(self, event: SlotEvent | LocalEvent) -> None:
        """The first event of a hand-off, or what follows if its prefill host fails in mid-prompt. Raises InvalidAnswer,
        also if there were others before that it cannot follow."""
        if self.begun and (not self.goes_on or self.tokens):
            raise self._invalid("it opened a second slot")
        again = self.begun
        self.begun, self.goes_on = True, isinstance(event, SlotEvent) and event.kv_version >= KV_CHUNKS
        self.slots += isinstance(event, SlotEvent)
        if self.slots > MAX_SLOTS:
            raise self._invalid(f"it opened slot {self.slots}")
        prompt_tokens, held_tokens = event.prompt_tokens, event.held_tokens
        if again and prompt_tokens != self.prompt_tokens:
            raise self._invalid("its slots are of different prompts")
        if held_tokens > prompt_tokens + self.given:
            raise self._invalid(f"it states that it holds {held_tokens} of {prompt_tokens} prompt tokens")
        self.require_prompt(prompt_tokens)
        self.prompt_tokens = prompt_tokens

    def require_prompt(self, tokens: int) -> None:
        """Raises InvalidAnswer if the prompt has another number of tokens."""
        if self.prompt_tokens and tokens != self.prompt_tokens:
            raise self._invalid(f"it counts {tokens} prompt tokens, and there are {self.prompt_tokens}")

    def take(self, event: TokensEvent) -> None:
        """Some tokens and their text. Raises InvalidAnswer before any of it is delivered."""
        self.begun = True
        self.tokens += len(event.tokens)
        self.chars += len(event.text) + len(event.reasoning)
        if event.tool_calls:
            self.called = True
            self.chars += sum(len(str(call)) for call in event.tool_calls)
        if not event.tokens:
            raise self._invalid("it sent text without a token")
        if self.given + self.tokens > self.max_tokens:
            raise self._invalid(f"it sent more than the {self.max_tokens} tokens that were asked for")
        if self.chars > TOKEN_CHARS * self.tokens + MORE_CHARS:
            raise self._invalid(f"it sent {self.chars} characters for {self.tokens} tokens")
        if self.vocab_size:
            for token in event.tokens:
                if token.id >= self.vocab_size:
                    raise self._invalid(f"it sent token {token.id}, and the model has {self.vocab_size}")

    def end(self, done: DoneEvent) -> None:
        """The end of the answer. Raises InvalidAnswer."""
        self.require_prompt(done.prompt_tokens)
        if not self.given and done.completion_tokens != self.tokens:
            raise self._invalid(f"it counts {done.completion_tokens} tokens of its answer, and sent {self.tokens}")
        if self.given + self.tokens == 0:
            raise self._invalid("it ended the answer before its first token")
        if done.computed_prompt_tokens > done.prompt_tokens + self.given:
            computed = done.computed_prompt_tokens
            raise self._invalid(f"it states that it computed {computed} of {done.prompt_tokens} prompt tokens")
        if done.audited_tokens > AUDITS * (done.prompt_tokens + self.given):
            raise self._invalid(
                f"it states that it audited {done.audited_tokens} of {done.prompt_tokens} prompt tokens"
            )
        if done.held_tokens > done.prompt_tokens:
            raise self._invalid(f"it states that it held {done.held_tokens} of {done.prompt_tokens} prompt tokens")
        if done.reasoning_tokens > self.given + self.tokens:
            raise self._invalid(f"it counts {done.reasoning_tokens} tokens of reasoning in {self.tokens}")
        if done.finish_reason == "tool_calls" and not self.called and not self.given:
            raise self._invalid("it ended with a tool call, and sent none")
        if done.stop and done.stop not in self.stops:
            raise self._invalid("it ended at a stop string that was not asked for")

    def shipped(self, figures: ShippedEvent) -> str:
        """Why the figures of the prefill host cannot be; empty if they can. Its KV has been accepted, so that they are
        left out, and the answer is as good."""
        counts = (figures.computed_tokens, figures.held_tokens)
        fit = figures.prompt_tokens == self.prompt_tokens and max(counts) <= self.prompt_tokens + self.given
        return "" if fit else f"they do not fit a prompt of {self.prompt_tokens} tokens"

    def _invalid(self, reason: str) -> InvalidAnswer:
        return InvalidAnswer(f"the answer of {self.host} does not fit: {reason}", _HINT)
