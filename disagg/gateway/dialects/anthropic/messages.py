"""The messages of Anthropic's API: lists of blocks, of which one may hold what others write as several messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from disagg.api.base import Contract
from disagg.errors import RequestError

BILLING: Final = "x-anthropic-billing-header:"
"""Claude Code's first system block. It holds a number that changes with every request, so that no prompt would begin
like the last one and no KV could be reused; it says nothing to a model."""


class Block(Contract, frozen=True):
    """A block of a message's content. id, name, input: of a tool_use. tool_use_id, content: of a tool_result."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Mapping[str, Any] = {}
    tool_use_id: str = ""
    content: str | tuple[Block, ...] | None = None


class Message(Contract, frozen=True):
    """One message. The results of tools are blocks of the user's messages."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | tuple[Block, ...]


def system(given: str | Sequence[Block] | None) -> list[dict[str, Any]]:
    """The system message, if there is one."""
    blocks = [given] if isinstance(given, str) else _texts(given or (), "system")
    text = "\n".join(block for block in blocks if not block.startswith(BILLING))
    return [{"role": "system", "content": text}] if text else []


def messages(given: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as disagg's hosts take them. Raises RequestError for content that is not supported."""
    if given[-1].role == "assistant":
        raise RequestError("messages: the last is the assistant's, and no answer can begin with it", "leave it out")
    names: dict[str, str] = {}
    written: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        place = f"messages[{index}].content"
        blocks = (Block("text", text=message.content),) if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            names |= {block.id: block.name for block in blocks if block.type == "tool_use"}
            written.append(_answer(blocks, place))
        else:
            written += _asked(message.role, blocks, place, names)
    return written


def _asked(role: str, blocks: Sequence[Block], place: str, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A message for every tool_result, and one for all text that follows the last. names: of tools, by their calls."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            texts += _texts((block,), place, index)
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        yield _result(block, f"{place}[{index}].content", names)
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}


def _result(block: Block, place: str, names: Mapping[str, str]) -> dict[str, Any]:
    content = [block.content] if isinstance(block.content, str) else _texts(block.content or (), place)
    written = {"role": "tool", "content": "\n".join(content), "tool_call_id": block.tool_use_id}
    return written | ({"name": name} if (name := names.get(block.tool_use_id)) else {})


def _answer(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    """An earlier answer. Reasoning that only Anthropic can read is left out."""
    of_kind: dict[str, list[Block]] = {"text": [], "thinking": [], "tool_use": [], "redacted_thinking": []}
    for index, block in enumerate(blocks):
        if block.type not in of_kind:
            raise _unsupported(block, f"{place}[{index}]")
        of_kind[block.type].append(block)
    written: dict[str, Any] = {"role": "assistant", "content": "\n".join(block.text for block in of_kind["text"])}
    if of_kind["thinking"]:
        written["reasoning"] = "\n".join(block.thinking for block in of_kind["thinking"])
    if calls := of_kind["tool_use"]:
        written["tool_calls"] = [{"name": one.name, "arguments": dict(one.input), "id": one.id} for one in calls]
    return written


def _texts(blocks: Sequence[Block], place: str, first: int = 0) -> list[str]:
    """The text of each block. first: number of the first one, for errors."""
    for index, block in enumerate(blocks, first):
        if block.type != "text":
            raise _unsupported(block, f"{place}[{index}]")
    return [block.text for block in blocks]


def _unsupported(block: Block, place: str) -> RequestError:
    return RequestError(f"{place}.type: {block.type!r} is not supported by this gateway", "send text only")
