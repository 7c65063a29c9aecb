"""How the chunks of a stream become the pieces of an answer."""

from __future__ import annotations

import pytest

from disagg.api.requests import ToolCall
from disagg.gateway.dialects.base import AnswerPiece
from disagg.gateway.run import pieces
from disagg.inference.types import Chunk
from tests.gateway.fake_client import tokens_of

CALL = ToolCall("f", {}, "c1")
TEXT, MORE = Chunk("a ", tokens_of("a")), Chunk("b c", tokens_of("b c"))
THOUGHT = Chunk("", tokens_of("t"), reasoning="t")
CALLED = Chunk("", tokens_of("f"), tool_calls=(CALL,))
NOTE = Chunk("", (), note="prefill-1 failed")


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([TEXT], ["a "]),
        ([TEXT, MORE], ["a b c"]),
        ([NOTE, TEXT, NOTE, MORE], ["a b c"]),
        ([THOUGHT, THOUGHT], ["<tt>"]),
        ([THOUGHT, TEXT, MORE], ["<t>", "a b c"]),
        ([TEXT, THOUGHT], ["a ", "<t>"]),
        ([TEXT, CALLED, TEXT], ["a f()", "a "]),
        ([CALLED, CALLED], ["f()", "f()"]),
        ([NOTE], []),
    ],
)
def test_chunks_that_arrive_together_are_one_piece_unless_that_changes_their_order(
    chunks: list[Chunk], expected: list[str]
) -> None:
    found = pieces(0, chunks, None)
    assert [written(piece) for piece in found] == expected
    assert [token for piece in found for token in piece.tokens] == [token for chunk in chunks for token in chunk.tokens]


def written(piece: AnswerPiece) -> str:
    reasoning = f"<{piece.reasoning}>" if piece.reasoning else ""
    return reasoning + piece.text + "".join(f"{call.name}()" for call in piece.tool_calls)
