"""Simon Willison's `llm`, with its entry for OpenAI's API and its plugin for Ollama's."""

from __future__ import annotations

import json
from pathlib import Path

from checks import KEY, MODEL, PET, QUESTION, URL, V1, ended, is_pet, need, run

FOLDER = Path.home() / "llm"
ENTRY = f"""- model_id: gateway
  model_name: {MODEL}
  api_base: {V1}
  supports_tools: true
  supports_schema: true
"""
FOLDER.mkdir(exist_ok=True)
(FOLDER / "extra-openai-models.yaml").write_text(ENTRY)
SETTINGS = {"LLM_USER_PATH": str(FOLDER), "OPENAI_API_KEY": KEY, "OLLAMA_HOST": URL}


def llm(*words: str) -> str:
    return ended(["llm", *words], **SETTINGS)


def chat() -> None:
    need(llm("-m", "gateway", QUESTION, "-o", "max_tokens", "24", "--no-stream").strip(), "no text")


def stream() -> None:
    need(llm("-m", "gateway", QUESTION, "-o", "max_tokens", "24").strip(), "no text")


def talk() -> None:
    llm("-m", "gateway", QUESTION, "-o", "max_tokens", "16")
    need(llm("-c", "And 7 * 8?", "-o", "max_tokens", "16").strip(), "no text")


def schema() -> None:
    answer = llm("-m", "gateway", "A cat.", "--schema", json.dumps(PET), "-o", "max_tokens", "200")
    need(is_pet(answer), "not of the form")


def tools() -> None:
    llm("-m", "gateway", QUESTION, "-T", "llm_version", "-o", "max_tokens", "24")


def ollama() -> None:
    need(MODEL in llm("ollama", "models"), "the model is not listed")
    need(llm("-m", f"ollama/{MODEL}", QUESTION, "-o", "num_predict", "16").strip(), "no text")


run(chat=chat, stream=stream, continued=talk, schema=schema, tools=tools, ollama_plugin=ollama)
