"""LiteLLM's proxy in front of the gateway."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from checks import KEY, MODEL, QUESTION, V1, need, report

CONFIG = Path.home() / "config.yaml"
CONFIG.write_text(
    f"""general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
model_list:
  - model_name: gateway
    litellm_params: {{model: "openai/{MODEL}", api_base: "{V1}", api_key: "{KEY}"}}
"""
)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
BASE = f"http://127.0.0.1:{PORT}"
BODY = {"model": "gateway", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24}


def post(path: str, **fields: Any) -> str:
    request = urllib.request.Request(
        BASE + path, json.dumps(BODY | fields).encode(), {"Content-Type": "application/json", "x-api-key": KEY}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def chat() -> None:
    need(json.loads(post("/v1/chat/completions"))["choices"][0]["message"]["content"], "no text")


def stream() -> None:
    need(post("/v1/chat/completions", stream=True).rstrip().endswith("data: [DONE]"), "no end")


def messages() -> None:
    need(json.loads(post("/v1/messages"))["content"], "no text")


def responses() -> None:
    need(json.loads(post("/v1/responses", input=QUESTION, messages=None))["output"], "no text")


with subprocess.Popen(
    ["litellm", "--config", str(CONFIG), "--port", str(PORT), "--host", "127.0.0.1"],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    env=dict(os.environ),
) as proxy:
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{BASE}/health/liveliness", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        report(chat=chat, stream=stream, messages=messages, responses=responses)
    finally:
        proxy.kill()
