"""Errors of requests in the words of the command line."""

from __future__ import annotations

import pytest

from disagg.cli.common.sampling import for_command_line, request_options
from disagg.errors import (
    ContextLengthExceeded,
    DisaggError,
    KVMemoryExceeded,
    RequestError,
    ServerUnavailable,
    UsageError,
)


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (RequestError("sampling.top_p: over 1"), "--top-p: over 1", ""),
        (RequestError("deadline_s: over 0"), "--timeout: over 0", ""),
        (RequestError("split: 13 of 32 layers", 'give "auto"'), "--split: 13 of 32 layers", 'give "auto"'),
        (
            ContextLengthExceeded("5 prompt tokens + 9 max_tokens = 14", "lower max_tokens"),
            "5 prompt tokens + 9 --max-tokens = 14",
            "lower --max-tokens",
        ),
        (KVMemoryExceeded("too large", "lower max_tokens"), "too large", "lower --max-tokens"),
        (ServerUnavailable("max_tokens", "x"), "max_tokens", "x"),
    ],
)
def test_an_error_names_the_option_and_not_the_field(error: DisaggError, message: str, hint: str) -> None:
    shown = for_command_line(error)
    assert (shown.message, shown.hint, type(shown)) == (message, hint, type(error))


@pytest.mark.parametrize(("text", "split"), [("auto", "auto"), ("off", "off"), ("0", 0), ("12", 12), ("1024", 1024)])
def test_a_prompt_is_divided_by_a_word_or_a_number_of_layers(text: str, split: object) -> None:
    assert request_options(split=text)["split"] == split


@pytest.mark.parametrize("text", ["", "half", "-1", "1.5", "1025", "\u0663", "9" * 5000])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--split: there is no split") as raised:
        request_options(split=text)
    assert raised.value.hint == "auto or off, or a number of layers from 0 to 1024"
