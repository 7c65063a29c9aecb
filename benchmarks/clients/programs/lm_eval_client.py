"""lm-evaluation-harness: its two models for OpenAI's API, on a task of ours."""

from __future__ import annotations

import os

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


run(
    loglikelihood=lambda: evaluated("disagg_choice", "local-completions", "/completions"),
    rolling=lambda: evaluated("disagg_text", "local-completions", "/completions"),
    generate=lambda: evaluated("disagg_generate", "local-completions", "/completions"),
    chat=lambda: evaluated("disagg_generate", "local-chat-completions", "/chat/completions", "--apply_chat_template"),
)
