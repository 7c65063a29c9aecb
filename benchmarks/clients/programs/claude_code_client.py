"""Claude Code, without a terminal."""

from __future__ import annotations

import json

from checks import MODEL, QUESTION, URL, ended, need, run

SETTINGS = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": "unused",
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    "DISABLE_TELEMETRY": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024",
    "IS_SANDBOX": "1",
}


def claude(*words: str) -> str:
    return ended(["claude", "-p", QUESTION, "--model", MODEL, *words], seconds=280, **SETTINGS)


def ask() -> None:
    answer = json.loads(claude("--tools", "", "--output-format", "json", "--system-prompt", "Be short."))
    need(not answer.get("is_error"), str(answer.get("result"))[:250])


def tools() -> None:
    words = ("--tools", "Read", "--output-format", "json", "--system-prompt", "Be short.")
    answer = json.loads(claude(*words))
    need(not answer.get("is_error"), str(answer.get("result"))[:250])


run(ask=ask, tools=tools)
