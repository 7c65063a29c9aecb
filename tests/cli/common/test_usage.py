"""Errors of the command line, in our words."""

from __future__ import annotations

import pytest

from disagg.cli.app import invoke
from disagg.errors import UsageError


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate qwen --max-tokens x", "--max-tokens: a whole number (got x)"),
        ("generate qwen --timeout soon", "--timeout: a number (got soon)"),
        ("generate qwen --top-p 7", "--top-p: over 0, at most 1 (got 7.0)"),
        ("generate qwen --alone mac", "--alone: one of decode, prefill, whole (got mac)"),
        ("serve --port 99999", "--port: at most 65535 (got 99999)"),
        ("logs -n 0", "-n / --lines: at least 1 (got 0)"),
        ("generate --xyz", "no such option: --xyz"),
        (
            "serve endpoints",
            "missing option '--format'. Choose from: smg, llm-d, litellm, prometheus",
        ),
    ],
)
def test_a_wrong_option_is_named_with_its_range_and_what_was_given(line: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        invoke(line.split())
    assert raised.value.message == message
    assert "Input should" not in str(raised.value)
