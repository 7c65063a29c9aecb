"""GuideLLM: a short synthetic load."""

from __future__ import annotations

import json
import os
from pathlib import Path

from checks import MODEL, URL, ended, need, run

REPORT = Path.home() / "report.json"


def load(path: str) -> None:
    REPORT.unlink(missing_ok=True)
    options = {
        "--backend": f"kind=openai_http,target={URL},model={MODEL},request_format={path}",
        "--profile": "kind=synchronous",
        "--constraint": "kind=max_requests,count=4",
        "--tokenizer": f"kind=hf_auto,model={os.environ['MODEL_FOLDER']}",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output": f"kind=json,path={REPORT}",
    }
    words = [word for option in options.items() for word in option]
    ended(["guidellm", "run", *words, "--disable-console-interactive"])
    need(json.loads(REPORT.read_text())["benchmarks"], "no report")


run(chat=lambda: load("/v1/chat/completions"), completions=lambda: load("/v1/completions"))
