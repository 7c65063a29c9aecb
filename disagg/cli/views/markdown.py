"""Markdown as models write it: which blocks of a text are complete, and how one looks."""

from __future__ import annotations

from textwrap import dedent, indent
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, emphasis, newline
from markdown_it.token import Token
from rich.markdown import Markdown

_PARSER: Final = MarkdownIt().enable("strikethrough").enable("table").disable(["html_block", "html_inline"])
"""Tags are text: a model that writes `List<int>` means no HTML."""
_BLOCKS: Final = MarkdownIt().enable("table").disable("html_block")
"""Finds where blocks begin, and does not parse what is in them: that costs the most by far."""
_BLOCKS.core.ruler.disable("inline")
_HEADS: Final = {"fence": 1, "table_open": 2}  # lines without which the others are no part of such a block
_LISTS: Final = ("bullet_list_open", "ordered_list_open")


def _newline(state: StateInline, silent: bool) -> bool:
    """The end of a line. The spaces that begin the next one stay: models write code without fences, too."""
    end = state.pos + 1
    found = newline(state, silent)
    state.pos = end if found else state.pos
    return found


def _emphasis(state: StateInline, silent: bool) -> bool:
    """Only stars emphasize: in what models write, `__init__` and `_rest` are names."""
    return state.src[state.pos] != "_" and emphasis.tokenize(state, silent)


_PARSER.inline.ruler.at("newline", _newline)
_PARSER.inline.ruler.at("emphasis", _emphasis)


def whole_blocks(text: str) -> int:
    """How many characters of a Markdown text are blocks that nothing that follows can change: all but the last."""
    starts = [token.map[0] for token in _BLOCKS.parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    return sum(len(line) for line in text.splitlines(keepends=True)[: starts[-1]]) if starts else 0


def end_of_block(text: str, lines: int, columns: int) -> str:
    """As much of the end of an unfinished block as a screen of this size shows, so that to draw it costs the same
    however long the block is. The end of a code block or of a table keeps its head."""
    rows = text.splitlines(keepends=True)
    if len(rows) <= lines and len(text) <= lines * columns:
        return text
    cut = max(0, len(rows) - lines)
    tokens, head = _BLOCKS.parse(text), ""
    for token in tokens:
        if token.map and token.type in _HEADS and token.map[0] < len(rows) <= token.map[1]:
            begin, size = token.map[0], _HEADS[token.type]
            head = dedent("".join(rows[begin : begin + size]))
            cut = max(cut, begin + size)
    end = "".join(rows[cut:])[-lines * columns :]
    return head + (dedent(end) if tokens[0].type in _LISTS else end)


class AnswerMarkdown(Markdown):
    """Markdown as models write it: a line break is one, indentation stays, and tags and underscores are text."""

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            _keep_lines(token)


def _keep_lines(token: Token) -> None:
    if token.type == "code_block":  # Markdown takes four spaces from each of its lines
        token.content = indent(token.content, " " * 4)
    for child in token.children or ():
        if child.type == "softbreak":
            child.type = "hardbreak"
