"""What a conversation sends, and what stays of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg.api.base import InvalidValue
from disagg.cli.chat.conversation import Conversation, Turn

BEGUN = Conversation("qwen").with_turn("hello", "Hi.", cut=False)


def test_a_request_has_all_turns_in_order_and_the_new_message_last() -> None:
    assert replace(BEGUN, system="Be brief.").messages("again") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "again"},
    ]


def test_without_a_system_message_none_is_sent() -> None:
    assert Conversation("qwen").messages("hello") == [{"role": "user", "content": "hello"}]


def test_an_answer_that_was_cut_stays_as_far_as_it_came_and_is_marked() -> None:
    cut = BEGUN.with_turn("more", "One, tw", cut=True)
    assert cut.turns[-1] == Turn("more", "One, tw", cut=True)
    assert cut.messages("x")[-2] == {"role": "assistant", "content": "One, tw"}


def test_a_message_whose_answer_never_began_leaves_no_turn() -> None:
    assert BEGUN.with_turn("more", "", cut=True) == BEGUN
    assert len(BEGUN.with_turn("more", "", cut=False).turns) == 2, "an empty answer that is complete is one"


def test_clearing_keeps_the_model_and_the_system_message() -> None:
    assert replace(BEGUN, system="s", model="other", turns=()) == Conversation("other", "s")


def test_a_conversation_is_read_as_it_was_written_and_nothing_else_is() -> None:
    assert Conversation.from_bytes(BEGUN.to_bytes()) == BEGUN
    with pytest.raises(InvalidValue):
        Conversation.from_bytes(b'{"model": "qwen", "messages": []}')
