"""Open WebUI with the gateway as its Ollama and as its OpenAI API, asked as its own page asks it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from checks import KEY, MODEL, QUESTION, URL, V1, need, report

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
BASE = f"http://127.0.0.1:{PORT}"
SETTINGS = {
    "DATA_DIR": str(Path.home() / "data"),
    "ENABLE_VERSION_UPDATE_CHECK": "False",
    "OFFLINE_MODE": "True",
    "OLLAMA_BASE_URL": URL,
    "OPENAI_API_BASE_URL": V1,
    "OPENAI_API_KEY": KEY,
    "RAG_EMBEDDING_ENGINE": "ollama",  # else it downloads a model for documents
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": KEY,
}
ASKED = [{"role": "user", "content": QUESTION}]
CHAT = {"model": MODEL, "messages": ASKED, "params": {"max_tokens": 24}}
OLLAMA = {"model": MODEL, "messages": ASKED, "stream": False, "options": {"num_predict": 8}}
ADVANCED = {
    "frequency_penalty": 0.1,
    "keep_alive": "5m",
    "max_tokens": 8,
    "min_p": 0.05,
    "num_batch": 512,
    "num_ctx": 2048,
    "num_gpu": 1,
    "num_keep": 4,
    "num_thread": 2,
    "presence_penalty": 0.1,
    "repeat_penalty": 1.1,
    "seed": 3,
    "stop": ["zz"],
    "temperature": 0.5,
    "think": False,
    "top_k": 5,
    "top_p": 0.9,
    "use_mlock": False,
    "use_mmap": True,
}
"""What its page calls advanced parameters."""
TOKEN = ""


def asked(path: str, body: Any = None, method: str | None = None) -> str:
    """Raises AssertionError with what Open WebUI passes on of the gateway's error."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(BASE + path, data, headers, method=method), timeout=60
        ) as it:
            return str(it.read().decode())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code} {error.read().decode()}") from None


def connection() -> None:
    need(json.loads(asked("/ollama/verify", {"url": URL}))["version"], "no version")
    need(json.loads(asked("/ollama/api/version"))["version"], "no version")
    need(json.loads(asked("/openai/verify", {"url": V1, "key": KEY}))["data"], "no models")


def models() -> None:
    need(MODEL in [one["model"] for one in json.loads(asked("/ollama/api/tags"))["models"]], "not of Ollama's")
    need(MODEL in [one["id"] for one in json.loads(asked("/openai/models"))["data"]], "not of OpenAI's")
    need(MODEL in [one["id"] for one in json.loads(asked("/api/models"))["data"]], "not of the page's")


def chat() -> None:
    answer = json.loads(asked("/api/chat/completions", CHAT))
    need(answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"], "no text or no figures")


def stream() -> None:
    text = asked("/api/chat/completions", CHAT | {"stream": True})
    need(text.count("data: ") > 4 and text.rstrip().endswith("data: [DONE]"), "no end")


def advanced() -> None:
    need(json.loads(asked("/api/chat/completions", CHAT | {"params": ADVANCED}))["choices"], "no answer")


def title() -> None:
    need(json.loads(asked("/api/v1/tasks/title/completions", CHAT))["choices"], "no answer")


def ollama_api() -> None:
    need(json.loads(asked("/ollama/api/chat", OLLAMA))["done"], "no end of a chat")
    need(json.loads(asked("/ollama/api/generate", OLLAMA | {"prompt": QUESTION, "messages": None}))["done"], "no end")
    need(json.loads(asked("/ollama/api/show", {"model": MODEL}))["capabilities"], "no capabilities")
    need("models" in json.loads(asked("/ollama/api/ps")), "no models")


def openai_apis() -> None:
    short = {"model": MODEL, "messages": ASKED, "max_tokens": 8}
    for way in ("openai", "ollama/v1"):
        need(json.loads(asked(f"/{way}/chat/completions", short))["choices"], f"no answer by {way}")
    need(json.loads(asked("/ollama/v1/messages", short))["content"], "no message")
    need(json.loads(asked("/ollama/v1/responses", {"model": MODEL, "input": QUESTION}))["output"], "no response")


def load_unload() -> None:
    asked("/ollama/api/generate", {"model": MODEL, "prompt": "", "stream": False, "keep_alive": "5m"})
    asked("/ollama/api/unload", {"model": MODEL})


def pull() -> None:
    need('"success"' in asked("/ollama/api/pull/0", {"model": MODEL}), "no end")


def embeddings() -> None:
    asked("/ollama/api/embed", {"model": MODEL, "input": [QUESTION]})


with subprocess.Popen(
    ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(PORT)],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    env=os.environ | SETTINGS,
) as webui:
    try:
        for _ in range(360):
            try:
                urllib.request.urlopen(f"{BASE}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        TOKEN = json.loads(asked("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
        report(
            connection=connection,
            models=models,
            chat=chat,
            stream=stream,
            advanced=advanced,
            title=title,
            ollama_api=ollama_api,
            openai_apis=openai_apis,
            load_unload=load_unload,
            pull=pull,
            embeddings=embeddings,
        )
    finally:
        webui.kill()
