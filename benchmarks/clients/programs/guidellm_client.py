"""GuideLLM: a short synthetic load."""

from __future__ import annotations

import os
from pathlib import Path

from checks import MODEL, URL, ended, need, run

REPORT = Path.home() / "report.json"
COMMON = ["guidellm", "benchmark", "--target", URL, "--model", MODEL, "--processor", os.environ["MODEL_FOLDER"]]
LOAD = ["--rate-type", "synchronous", "--max-requests", "4", "--data", "prompt_tokens=32,output_tokens=8"]


def load(route: str) -> None:
    REPORT.unlink(missing_ok=True)
    ended([*COMMON, *LOAD, "--output-path", str(REPORT)], GUIDELLM__PREFERRED_ROUTE=route)
    need(REPORT.exists(), "no report")


run(chat=lambda: load("chat_completions"), completions=lambda: load("text_completions"))
