"""lm-evaluation-harness: its two models for OpenAI's API, on a task of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from checks import MODEL, V1, ended, need, run

TASKS = os.environ["TASKS_FOLDER"]


def evaluated(task: str, model: str, path: str, *more: str) -> str:
    arguments = (
        f"model={MODEL},base_url={V1}{path},tokenizer={os.environ['MODEL_FOLDER']},max_retries=1,num_concurrent=2"
    )
    text = ended(
        ["lm_eval", "--model", model, "--model_args", arguments, "--tasks", task, "--include_path", TASKS, *more],
        seconds=280,
        OPENAI_API_KEY="unused",
    )
    need(task in text, "no result")
    return ""


def items(name: str, model: str, arguments: str, task: str, *more: str) -> list[float]:
    """What each item's responses are found to be, as numbers."""
    folder = Path.home() / name
    shutil.rmtree(folder, ignore_errors=True)
    command = ["lm_eval", "--model", model, "--model_args", arguments, "--tasks", task, "--include_path", TASKS]
    ended([*command, *more, "--log_samples", "--output_path", str(folder)], seconds=280, OPENAI_API_KEY="unused")
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    samples = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda one: one["doc_id"])
    return [float(number) for one in samples for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", str(one["resps"]))]


def equal() -> str:
    """The same task on transformers itself, in float32, item by item."""
    tokenizer, furthest = os.environ["MODEL_FOLDER"], 0.0
    through = f"model={MODEL},base_url={V1}/completions,tokenizer={tokenizer},max_retries=1,num_concurrent=2"
    for task in ("disagg_choice", "disagg_text"):
        ours = items("gateway", "local-completions", through, task)
        theirs = items("transformers", "hf", f"pretrained={tokenizer},dtype=float32", task, "--device", "cpu")
        need(len(ours) == len(theirs) > 3, f"{len(ours)} and {len(theirs)} items")
        furthest = max(furthest, *(abs(one - other) for one, other in zip(ours, theirs, strict=True)))
    need(furthest < 1e-4, f"an item differs by {furthest:.1e}")
    return f"at most {furthest:.1e} apart"


run(
    equal_to_transformers=equal,
    loglikelihood=lambda: evaluated("disagg_choice", "local-completions", "/completions"),
    rolling=lambda: evaluated("disagg_text", "local-completions", "/completions"),
    generate=lambda: evaluated("disagg_generate", "local-completions", "/completions"),
    chat=lambda: evaluated("disagg_generate", "local-chat-completions", "/chat/completions", "--apply_chat_template"),
)
