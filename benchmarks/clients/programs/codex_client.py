"""Codex, without a terminal: a provider of its own, and `--oss`, which is Ollama's API."""

from __future__ import annotations

from pathlib import Path

from checks import MODEL, QUESTION, V1, ended, run

FOLDER = Path.home() / ".codex"
FOLDER.mkdir(exist_ok=True)
(FOLDER / "config.toml").write_text(
    f"""model = "{MODEL}"
model_provider = "disagg"
[model_providers.disagg]
name = "disagg"
base_url = "{V1}"
wire_api = "responses"
stream_max_retries = 0
request_max_retries = 0
"""
)
COMMON = ["codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only"]


def ask() -> None:
    ended([*COMMON, QUESTION], seconds=280)


def oss() -> None:
    ended([*COMMON, "--oss", "--local-provider", "ollama", "-m", MODEL, QUESTION], seconds=280, CODEX_OSS_BASE_URL=V1)


run(provider=ask, oss=oss)
