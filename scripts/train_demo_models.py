"""Train the two demo models, tiny but of the real architectures, on the source of the Python standard library.

    python scripts/train_demo_models.py --model qwen3-moe-tiny --out first --minutes 24
    python scripts/train_demo_models.py --model qwen3-moe-tiny --out disagg/demo/models --refine first

and the same with `--model gpt-oss-tiny`. The first run learns from the files unchanged. The second continues with code
only: with greedy sampling, a model this small repeats the prose of docstrings endlessly, but not code.

Each run writes OUT/MODEL, a checkpoint in the format of the Hugging Face hub: bf16 safetensors, flat `rope_theta` /
`rope_scaling` keys, a tokenizer with a chat template. transformers and mlx-lm both load it. One CPU thread is enough;
two runs fit on two cores.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Tokenizer,
    Qwen3MoeConfig,
)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\nTo call a function, write "
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call>\n\' }}'
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{% set tool_call = call.function or call %}"
    "<tool_call>{{ {'name': tool_call.name, 'arguments': tool_call.arguments} | tojson }}</tool_call>"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The models never learned to call tools: a program that offers tools gets an answer without calls."""
VOCAB_SIZE = 2048
# Generated tables, copies of old grammars, test data, installed packages: no style to learn.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "encodings", "idlelib", "lib2to3", "pydoc_data"}
CHAT_SAMPLES = 3000
TOKENS_PER_STEP = 2048
# Rows are short while the model learns the language, and long at the end so that it uses its context.
SHORT_CONTEXT, LONG_CONTEXT, LONG_FROM = 256, 1024, 0.8
PEAK_LEARNING_RATE, REFINING_LEARNING_RATE, WARMUP = 3e-3, 1.5e-3, 0.03
LONGEST_TABLE = 400
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one demo model on the standard library's source.")
    parser.add_argument("--model", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="where MODEL/ is written")
    parser.add_argument("--refine", type=Path, metavar="FIRST", help="go on from FIRST/MODEL, on code alone")
    parser.add_argument("--minutes", type=float, default=19.0, help="wall-clock time to train for")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    files = stdlib_sources()
    held_out, training = files[::50], [text for i, text in enumerate(files) if i % 50]
    functions = [found for text in training for found in described_functions(text)]
    if args.refine:
        held_out, training = [code_of(text) for text in held_out], [code_of(text) for text in training]
        functions = [(request, code_of(source)) for request, source in functions]
        tokenizer = AutoTokenizer.from_pretrained(args.refine / args.model)
        model = AutoModelForCausalLM.from_pretrained(
            args.refine / args.model, dtype=torch.float32, experts_implementation="grouped_mm"
        )
    else:
        tokenizer = train_tokenizer(training)
        config = CONFIGS[args.model](tokenizer)
        model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    samples = training + chats(functions, tokenizer)
    random.shuffle(samples)
    tokens, unseen = encode(samples, tokenizer), encode(held_out, tokenizer)
    print(f"{len(training)} files, {len(tokens)} tokens, {len(unseen)} held out", flush=True)

    peak = REFINING_LEARNING_RATE if args.refine else PEAK_LEARNING_RATE
    train(model, tokens, minutes=args.minutes, peak=peak, seed=args.seed)
    # What ships is bf16, so that is what the reported loss is about.
    model.to(torch.bfloat16).float()
    print(f"{model.num_parameters()} parameters, held-out loss {loss_on(model, unseen):.3f}", flush=True)
    save(model, tokenizer, args.out / args.model)


def stdlib_sources() -> list[str]:
    """The text of the running interpreter's standard library, in path order."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in paths if not SKIPPED_FOLDERS.intersection(path.parts)]
    texts = [(root / path).read_text(encoding="utf-8", errors="replace") for path in kept]
    return [text for text in texts if text.strip()]


def code_of(text: str) -> str:
    """`text` without comments, docstrings and long tables; empty if it is not valid in this Python version."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ""
    tree.body = [
        node for node in tree.body if not isinstance(node, ast.Assign) or len(ast.unparse(node)) <= LONGEST_TABLE
    ]
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree) + "\n"


def train_tokenizer(texts: list[str]) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer with exactly `VOCAB_SIZE` ids.

    Qwen's splitting rules serve both models: AutoTokenizer rebuilds a `qwen3_moe` tokenizer with these rules
    whatever tokenizer.json says, so any other rules would silently change the ids.
    """
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, vocab_size=VOCAB_SIZE, new_special_tokens=[TURN_START, TURN_END]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    if len(tokenizer) != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer has {len(tokenizer)} ids, the models are built for {VOCAB_SIZE}")
    return tokenizer


def chats(functions: list[tuple[str, str]], tokenizer: Qwen2Tokenizer) -> list[str]:
    """One-turn chats that request a function of the library, so that the model answers chats with code and then
    stops."""
    turns = [
        [{"role": "user", "content": request}, {"role": "assistant", "content": source}]
        for request, source in random.sample(functions, min(CHAT_SAMPLES, len(functions)))
    ]
    return [str(tokenizer.apply_chat_template(turn, tokenize=False)) for turn in turns]


def described_functions(text: str) -> Iterator[tuple[str, str]]:
    """(request, source) for every function of 4 to 30 lines that has a docstring."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno and (summary := ast.get_docstring(node)):
            source = lines[node.lineno - 1 : node.end_lineno]
            if 4 <= len(source) <= 30:
                yield f"{node.name}: {summary.splitlines()[0]}", textwrap.dedent("\n".join(source)) + "\n"


def encode(samples: list[str], tokenizer: Qwen2Tokenizer) -> torch.Tensor:
    """All samples as one row of ids, each closed by the end-of-text token."""
    ids = [token for row in tokenizer([text + END_OF_TEXT for text in samples])["input_ids"] for token in row]
    return torch.tensor(ids)


def stop_ids(tokenizer: Qwen2Tokenizer) -> list[int]:
    return [int(tokenizer.convert_tokens_to_ids(token)) for token in (END_OF_TEXT, TURN_END)]


def qwen3_moe(tokenizer: Qwen2Tokenizer) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        **COMMON,
        moe_intermediate_size=128,
        intermediate_size=256,
        num_experts=4,
        norm_topk_prob=True,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        eos_token_id=stop_ids(tokenizer)[0],
    )


def gpt_oss(tokenizer: Qwen2Tokenizer) -> PreTrainedConfig:
    """Window, sinks, biases and RoPE as in openai/gpt-oss, including `truncate: false`."""
    return GptOssConfig(
        **COMMON,
        intermediate_size=128,
        num_local_experts=4,
        sliding_window=128,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        eos_token_id=stop_ids(tokenizer)[0],
    )


# No `pad_token_id` in either: padding is end-of-text here, and a padding id's embedding gets no gradient.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.01,
    "initializer_range": 0.04,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Callable[[Qwen2Tokenizer], PreTrainedConfig]] = {
    "qwen3-moe-tiny": qwen3_moe,
    "gpt-oss-tiny": gpt_oss,
}


def train(model: PreTrainedModel, tokens: torch.Tensor, *, minutes: float, peak: float, seed: int) -> None:
    """AdamW on random windows of `tokens` until the time is up; the learning rate depends on the elapsed time."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
    picker = torch.Generator().manual_seed(seed)
    started, step, smoothed = time.monotonic(), 0, math.nan
    model.train()
    while (progress := (time.monotonic() - started) / (minutes * 60)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = peak * min(progress / WARMUP, (1 - progress) / (1 - WARMUP))
        rows = pick_rows(tokens, SHORT_CONTEXT if progress < LONG_FROM else LONG_CONTEXT, picker)
        output = model(input_ids=rows, labels=rows, output_router_logits=True, use_cache=False)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        language = float(output.loss.detach() - model.config.router_aux_loss_coef * output.aux_loss.detach())
        smoothed = language if math.isnan(smoothed) else 0.98 * smoothed + 0.02 * language
        if step % 100 == 0:
            print(f"step {step} {progress:.0%} loss {smoothed:.3f}", flush=True)
    model.eval()
    print(f"trained {step} steps in {minutes:g} minutes, smoothed training loss {smoothed:.3f}", flush=True)


def pick_rows(tokens: torch.Tensor, context: int, picker: torch.Generator) -> torch.Tensor:
    """[TOKENS_PER_STEP / context, context] ids from random positions."""
    starts = torch.randint(len(tokens) - context, (TOKENS_PER_STEP // context,), generator=picker)
    return torch.stack([tokens[start : start + context] for start in starts.tolist()])


def loss_on(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Mean next-token loss over rows of `LONG_CONTEXT` ids."""
    rows = tokens[: len(tokens) // LONG_CONTEXT * LONG_CONTEXT].view(-1, LONG_CONTEXT)
    with torch.inference_mode():
        losses = [float(model(input_ids=row[None], labels=row[None], use_cache=False).loss) for row in rows]
    return sum(losses) / len(losses)


def save(model: PreTrainedModel, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write the checkpoint in the format of the hub."""
    model.generation_config = GenerationConfig(
        eos_token_id=stop_ids(tokenizer), pad_token_id=stop_ids(tokenizer)[0], do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    for how_it_was_loaded in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(how_it_was_loaded, None)
    tokenizer.save_pretrained(folder)
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(hub_config(json.loads(config_file.read_text())), indent=2) + "\n")


def hub_config(saved: dict[str, Any]) -> dict[str, Any]:
    """The keys of hub checkpoints in place of what transformers 5 saves.

    mlx-lm reads only the flat RoPE keys and would silently fall back to a default theta; its qwen3_moe wants
    `num_experts`, which transformers saves as `num_local_experts`.
    """
    rope = dict(saved["rope_parameters"])
    flat = {key: value for key, value in saved.items() if key != "rope_parameters"}
    flat["rope_theta"] = rope.pop("rope_theta")
    flat["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if flat["model_type"] == "qwen3_moe":
        flat["num_experts"] = flat.pop("num_local_experts")
    return dict(sorted(flat.items()))


if __name__ == "__main__":
    main()
