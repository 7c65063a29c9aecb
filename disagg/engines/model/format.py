"""How a model marks the parts of its answers: reasoning, tool calls, channels. Found by its vocabulary and template."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

HarmonyMark = Literal["start", "channel", "constrain", "message", "end", "call", "return"]
HARMONY: Final[tuple[HarmonyMark, ...]] = ("start", "channel", "constrain", "message", "end", "call", "return")
THINK: Final = (("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"), ("<|think:start|>", "<|think:end|>"))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """start, end: the marks around a call; without an end the answer's end is the call's. parse: (text between the
    marks, the tools as templates get them) -> {"name", "arguments"} or a list of such; it may raise any exception.
    json: the text is such an object, as JSON. ids: of the marks that are one token."""

    start: str
    end: str
    parse: Callable[[str, Sequence[Mapping[str, Any]]], Any]
    json: bool = False
    ids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """think: the marks around reasoning. tools: how calls are written, None if this is not known. parsers: whether it
    could be known: mlx-lm is on this host. hidden: special tokens that are no part of a mark. harmony: the ids of the
    marks of gpt-oss' channels, by name; None for every other model."""

    think: tuple[str, str] | None = None
    tools: ToolFormat | None = None
    parsers: bool = True
    hidden: frozenset[int] = frozenset()
    harmony: Mapping[HarmonyMark, int] | None = None


def find(tokenizer: Any) -> AnswerFormat:
    """The format of a model. tokenizer: one of transformers'."""
    vocabulary = tokenizer.get_vocab()
    harmony = {name: vocabulary[f"<|{name}|>"] for name in HARMONY if f"<|{name}|>" in vocabulary}
    if len(harmony) == len(HARMONY):
        return AnswerFormat(harmony=harmony)
    think = next((pair for pair in THINK if all(mark in vocabulary for mark in pair)), None)
    if think is None and {"<|channel>", "<channel|>"} <= vocabulary.keys():
        think = ("<|channel>thought", "<channel|>")
    try:
        tools, parsers = _tool_format(tokenizer), True
    except ImportError:
        tools, parsers = None, False
    marks = " ".join([*(think or ()), *((tools.start, tools.end) if tools else ())])
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    hidden = frozenset(token for token, text in special.items() if text not in marks)
    return AnswerFormat(think, tools, parsers, hidden)


def _tool_format(tokenizer: Any) -> ToolFormat | None:
    """mlx-lm's parser for this chat template, None if it has none. Raises ImportError if mlx-lm is not on this host."""
    from mlx_lm.tokenizer_utils import _infer_tool_parser

    name = tokenizer.init_kwargs.get("tool_parser_type") or _infer_tool_parser(tokenizer)
    if name is None:
        return None
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    start, end, vocabulary = parser.tool_call_start, parser.tool_call_end, tokenizer.get_vocab()
    ids = {mark: vocabulary[mark] for mark in (start, end) if mark in vocabulary}
    return ToolFormat(start, end, parser.parse_tool_call, json=name == "json_tools", ids=ids)
