"""Errors of requests in the words of the command line."""

from __future__ import annotations

import pytest

from disagg.cli.common.sampling import for_command_line
from disagg.errors import ContextLengthExceeded, DisaggError, KVMemoryExceeded, RequestError, ServerUnavailable


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (RequestError("sampling.top_p: over 1"), "--top-p: over 1", ""),
        (RequestError("deadline_s: over 0"), "--timeout: over 0", ""),
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
