"""How the bodies of OpenAI's APIs turn a model's reasoning on and off: by the names that clients of several servers use
for it, all of which reach the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.api.base import Contract
from disagg.gateway.dialects.base import thinking
from disagg.gateway.dialects.openai import SamplingFields


class Reasoning(Contract, frozen=True):
    """effort: a variable of the chat template; "none" turns reasoning off. enabled: turns it on or off. exclude: it is
    not sent."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool = False


class Thinking(Contract, frozen=True):
    """type: enabled, adaptive or disabled."""

    type: str


class ReasoningFields(SamplingFields, frozen=True, kw_only=True):
    """The fields of a body with a chat that say how the model reasons. enable_thinking, thinking, think: whether it
    does; think: or how hard."""

    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    think: bool | str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def template(self) -> dict[str, Any]:
        """The options of AsyncClient.stream with the variables of the chat template. Those that the caller has named
        itself come last."""
        asked, effort = self.reasoning or Reasoning(), self._effort
        stated = None if self.thinking is None else self.thinking.type != "disabled"
        level = None if self.think is None else bool(self.think)
        none = False if effort == "none" else None
        on = next((one for one in (self.enable_thinking, stated, level, asked.enabled, none) if one is not None), None)
        variables = {
            **({} if on is None else thinking(on)),
            **({} if effort is None else {"reasoning_effort": effort}),
            **(self.chat_template_kwargs or {}),
        }
        return {"chat_template_kwargs": variables} if variables else {}

    @property
    def _effort(self) -> str | None:
        given = self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)
        return given or (self.think if isinstance(self.think, str) else None)
