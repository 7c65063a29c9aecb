"""aider, one message without a terminal."""

from __future__ import annotations

import json
from pathlib import Path

from checks import KEY, MODEL, V1, ended, need, run

FOLDER = Path.home() / "work"
FOLDER.mkdir(exist_ok=True)
(FOLDER / "add.py").write_text("def add(a, b):\n    return a - b\n")
SETTINGS = {"OPENAI_API_BASE": V1, "OPENAI_API_KEY": KEY, "AIDER_ANALYTICS": "false"}
COMMON = [
    "aider",
    "--model",
    f"openai/{MODEL}",
    "--no-git",
    "--yes-always",
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--no-detect-urls",
    "--map-tokens",
    "0",
    "--timeout",
    "120",
]


def message(*more: str) -> str:
    settings = {"name": f"openai/{MODEL}", "edit_format": "whole", "extra_params": {"stop": ["\n"]}}
    (FOLDER / ".aider.model.settings.yml").write_text(json.dumps([settings]))
    done = ended(
        ["bash", "-c", 'cd "$0" && exec "$@"', str(FOLDER), *COMMON, *more, "--message", "What does add do?"],
        **SETTINGS,
    )
    need("litellm." not in done, " ".join(done.split())[-250:])
    return done


def ask() -> None:
    need("Tokens:" in message("--chat-mode", "ask", "add.py"), "no answer")


def edit() -> None:
    need("Tokens:" in message("add.py"), "no answer")


def streamless() -> None:
    need("Tokens:" in message("--no-stream", "--chat-mode", "ask", "add.py"), "no answer")


run(ask=ask, edit=edit, without_stream=streamless)
