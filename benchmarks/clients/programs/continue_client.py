"""Continue's command line, without a terminal."""

from __future__ import annotations

from pathlib import Path

from checks import KEY, MODEL, QUESTION, V1, ended, need, run

CONFIG = Path.home() / "config.yaml"
CONFIG.write_text(
    f"""name: gateway
version: 1.0.0
schema: v1
models:
  - name: gateway
    provider: openai
    model: {MODEL}
    apiBase: {V1}
    apiKey: {KEY}
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions: {{maxTokens: 24}}
"""
)


def ask() -> None:
    answer = ended(
        ["cn", "-p", QUESTION, "--config", str(CONFIG)],
        seconds=280,
        CONTINUE_TELEMETRY_ENABLED="0",
        POSTHOG_DISABLED="1",
    )
    need(answer.strip(), "no text")


run(ask=ask)
