"""GuideLLM: a short synthetic load."""

from __future__ import annotations

import os
from pathlib import Path

from checks import MODEL, URL, ended, need, run


def load(kind: str) -> str:
    text = ended(
        [
            "guidellm",
            "benchmark",
            "run",
            "--target",
            URL,
            "--model",
            MODEL,
            "--processor",
            os.environ["MODEL_FOLDER"],
            "--request-type",
            kind,
            "--profile",
            "synchronous",
            "--max-requests",
            "4",
            "--data",
            "prompt_tokens=32,output_tokens=8",
            "--output-path",
            str(Path.home() / "report.json"),
            "--disable-console-interactive",
        ]
    )
    need("4" in text, "no report")
    return ""


run(chat=lambda: load("chat_completions"), completions=lambda: load("text_completions"))
