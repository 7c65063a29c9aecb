"""What was said, as a frozen value. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.api.base import Contract


class Turn(Contract, frozen=True, forbid_unknown_fields=True):
    """A message and its answer. cut: the answer is not complete, because it was stopped or failed."""

    message: str
    answer: str
    cut: bool = False


class Conversation(Contract, frozen=True, forbid_unknown_fields=True):
    """A conversation with a model, as /save writes it. system: the text of its system message, empty for none."""

    model: str
    system: str = ""
    turns: tuple[Turn, ...] = ()

    def messages(self, message: str) -> list[dict[str, Any]]:
        """The messages of the request for the next answer. An answer that was cut is among them as far as it came."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            said += [{"role": "user", "content": turn.message}, {"role": "assistant", "content": turn.answer}]
        return [*said, {"role": "user", "content": message}]

    def with_turn(self, message: str, answer: str, *, cut: bool) -> Conversation:
        """The conversation after one more turn. A message whose answer never began leaves no turn, so that it can be
        sent again."""
        if cut and not answer:
            return self
        return msgspec.structs.replace(self, turns=(*self.turns, Turn(message, answer, cut)))
