"""Configurations that no table has: other head counts, windows, ratios, ropes, experts and states of the known
architectures, drawn at random; those of models as they are published (published.py); and each known one with one value
changed, of which log-probabilities are compared in place of answers. Each must be answered as by each framework alone,
or be refused in one line.

    python -m tests.surveys.fuzz COUNT [--seed N] [NAME...]
    python -m tests.surveys.fuzz --published [PART OF A NAME...]
    python -m tests.surveys.fuzz --each [NAME...]

Prints a line for each that is wrong, refused, or fails in any other way, with what was drawn, and for each that is
published; then the counts. Takes one to three seconds for each, for published ones up to ten. --each has 1,100, in
five minutes."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.errors import DisaggError
from tests.surveys.tables import GOOD, known, short

LENGTHS = (2, 50, 97, 161)
OF_PUBLISHED = (1, 2, 50, 161, 700, 1500)
ANSWER = 12
ROUNDING = 8e-4
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPES: Sequence[dict[str, Any]] = (
    {"rope_type": "linear", "factor": 2.0},
    {**_LLAMA3, "factor": 8.0, "original_max_position_embeddings": 256},
    _YARN,
    {**_YARN, "truncate": False},
    {**_YARN, "attention_factor": 1.2},
    {"rope_type": "dynamic", "factor": 2.0},
)
# What a key may become if the configuration has it.
_VALUES: Mapping[str, Sequence[Any]] = {
    "sliding_window": (17, 40, 64, 100),
    "partial_rotary_factor": (0.25, 0.5, 0.75, 1.0),
    "rms_norm_eps": (1e-6, 1e-5, 1e-3),
    "layer_norm_eps": (1e-6, 1e-5, 1e-3),
    "norm_eps": (1e-6, 1e-5, 1e-3),
    "layer_norm_epsilon": (1e-6, 1e-5, 1e-3),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "norm_topk_prob": (True, False),
    "num_experts_per_tok": (1, 2, 3),
    "moe_k": (1, 2, 3),
    "routed_scaling_factor": (1.0, 2.5),
    "n_shared_experts": (1, 2),
    "first_k_dense_replace": (0, 1, 2),
    "q_lora_rank": (None, 24),
    "kv_lora_rank": (16, 32, 48),
    "qk_rope_head_dim": (8, 16),
    "v_head_dim": (8, 16, 24),
    "rope_interleave": (True, False),
    "mamba_n_groups": (1, 2, 4),
    "n_groups": (1, 2, 4),
    "mamba_d_state": (8, 16, 32),
    "ssm_state_size": (8, 16, 32),
    "state_size": (8, 16, 32),
    "mamba_d_conv": (2, 3, 4),
    "conv_kernel": (2, 3, 4),
    "linear_conv_kernel_dim": (2, 3, 4),
    "conv_L_cache": (2, 3, 4),
    "linear_num_value_heads": (4, 8),
    "linear_value_head_dim": (8, 16, 32),
    "position_embedding_type": ("rope", "nope", None),
    "max_window_layers": (0, 1, 2, 3),
    "use_sliding_window": (True, False),
    "final_logit_softcapping": (20.0, 30.0),
    "attn_logit_softcapping": (30.0, 50.0),
    "logit_scale": (0.25, 0.5),
    "multi_query": (True, False),
}
# What is added, or takes the place of what a configuration has, whether it has such a key or not.
_ADDED: Sequence[dict[str, Any]] = (
    {"num_hidden_layers": 1},
    {"sliding_window": 1},
    {"sliding_window": 1500},
    {"eos_token_id": [1, 4]},
    {"rope_theta": 10000},
    {"mlp_bias": True},
    {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 6.0},
    {"use_qk_norm": False},
    {"qk_layernorm": True},
    {"n_shared_experts": 0},
    {"scoring_func": "softmax"},
    {"n_group": 2, "topk_group": 1},
    {"num_nextn_predict_layers": 1},
    {"conv_bias": True},
    {"use_conv_bias": False},
    {"mamba_conv_bias": False},
    {"time_step_limit": [0.0, float("inf")]},
    {"mamba_expand": 4},
    {"full_attention_interval": 2},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [0]},
    {"moe_layer_freq": 2},
    {"first_k_dense_replace": 3},
    {"norm_topk_prob": False},
    {"attention_dropout": 0.1},
    {"use_cache": False},
    {"pad_token_id": None},
    {"hidden_size": 96},
    {"head_dim": 24},
    {"max_position_embeddings": 2048},
    {"vocab_size": 641},
)
_OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
_LEFT_OUT = ("tie_word_embeddings", "rms_norm_eps", "attention_bias", "rope_theta", "norm_topk_prob", "head_dim")


def drawn(entry: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """Another configuration of the same architecture."""
    if "text_config" in entry:
        text = drawn(entry["text_config"], chance)
        return {**entry, "text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}
    made = dict(entry)
    for key, values in _VALUES.items():
        if made.get(key) is not None and chance.random() < 0.4:
            made[key] = chance.choice(values)
    for change in (_heads, _layers, _rope):
        change(made, chance)
    if chance.random() < 0.3:
        made.pop(chance.choice(_LEFT_OUT), None)
    if chance.random() < 0.6:
        made |= chance.choice([one for one in _ADDED if made.keys() & one.keys()] or _ADDED)
    return made | {own: made[key] for own, key in _OTHER_NAMES.items() if own in made}


def _heads(made: dict[str, Any], chance: random.Random) -> None:
    if "linear_attn_config" in made or "n_head" in made or chance.random() < 0.5:
        return
    heads = chance.choice((2, 4, 6, 8))
    made["num_attention_heads"] = heads
    shared = made.get("kv_lora_rank") or made.get("num_key_value_heads") == entry_heads(made)
    made["num_key_value_heads"] = heads if shared else chance.choice([n for n in (1, 2, 3, 4) if heads % n == 0])
    if "head_dim" in made:
        made["head_dim"] = chance.choice((8, 16, 32))
    elif made["hidden_size"] % (2 * heads):
        made["hidden_size"] = 16 * heads


def entry_heads(made: Mapping[str, Any]) -> int:
    return int(made["num_attention_heads"])


def _layers(made: dict[str, Any], chance: random.Random) -> None:
    kinds = made.get("layer_types")
    if kinds and chance.random() < 0.5:
        made["layer_types"] = chance.sample(list(kinds), len(kinds))
    elif kinds and chance.random() < 0.2:
        made["layer_types"] = [chance.choice(kinds)] * len(kinds)
    if kinds:
        made["num_hidden_layers"] = len(kinds)


def _rope(made: dict[str, Any], chance: random.Random) -> None:
    if made.get("rope_theta"):
        made["rope_theta"] = chance.choice((10000.0, 500000.0))
    if "rope_parameters" not in made and made.get("rope_theta") and chance.random() < 0.3:
        made["rope_scaling"] = dict(chance.choice(_ROPES))


def changed_once(entry: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every configuration that differs from this one in the value of one key, and what is changed."""
    text = entry.get("text_config", entry)
    values = {**_VALUES, "hidden_size": (96,), "num_hidden_layers": (1,)}
    for key in sorted(values.keys() & text.keys()):
        for value in values[key]:
            made = {**text, key: value}
            if value != text[key]:
                yield f"{key} = {value}", {**entry, "text_config": made} if "text_config" in entry else made


def near(pair: Any, lengths: Sequence[int]) -> str:
    """exact if the log-probabilities of both frameworks differ by no more than rounding."""
    from tests.engines.mlx.mlx_parts import prompt

    difference = pair.difference(prompt(lengths[-1], seed=1), prompt(ANSWER, seed=2))
    return "exact" if difference < ROUNDING else f"**differs** by {difference:.1e}"


def outcome(
    entry: Mapping[str, Any],
    folder: Path,
    lengths: Sequence[int] = LENGTHS,
    compared: Callable[[Any, Sequence[int]], str] | None = None,
) -> str:
    """exact, patched, refused, "not made" if transformers does not make such a model, or what is wrong."""
    from tests.engines.architectures.pairs import loaded
    from tests.surveys.published import context, make

    try:
        make(entry, folder)
    except Exception as error:  # noqa: BLE001 - a configuration that makes no sense
        return f"not made: {type(error).__name__}: {short(str(error), folder)}"
    try:
        served = context(entry)
        with loaded(folder, context=served) as pair:
            found = (compared or _compared)(pair, [length for length in lengths if length + ANSWER <= served])
            patched = [one for info in (pair.prefill.info, pair.decode.info) for one in info.preflight]
            return "patched" if found == "exact" and any(one.status == "patched" for one in patched) else found
    except DisaggError as error:
        return f"refused: {short(error.message, folder)}"
    except Exception as error:  # noqa: BLE001 - which is what is looked for
        return f"**error** {type(error).__name__}: {short(str(error), folder)}"


def _compared(pair: Any, lengths: Sequence[int]) -> str:
    from tests.engines.mlx.mlx_parts import prompt, start

    prompts = {length: prompt(length, seed=length) for length in lengths}
    handed_over = {n: start(pair.decode, tokens, pair.kv(tokens), max_tokens=ANSWER) for n, tokens in prompts.items()}
    alone = {n: start(pair.decode, tokens, max_tokens=ANSWER) for n, tokens in prompts.items()}
    for length, tokens in prompts.items():
        answer = handed_over[length].result()
        if answer != pair.greedy(tokens, answer):
            return f"**differs** from transformers at {length} tokens"
        if answer != alone[length].result():
            return f"**differs** from mlx-lm at {length} tokens"
    return "exact"


def run(count: int, seed: int, names: Sequence[str], report: Callable[[str], None]) -> Counter[str]:
    """How many became what."""
    entries, counts = known(), Counter[str]()
    chosen = names or [name for name, entry in entries.items()]
    for number in range(count):
        name, chance = chosen[number % len(chosen)], random.Random(f"{seed} {number}")
        entry = drawn(entries[name], chance)
        with tempfile.TemporaryDirectory(prefix="disagg-fuzz-") as folder:
            found = outcome(entry, Path(folder) / "model")
        counts[found if found in GOOD else found.partition(":")[0]] += 1
        if found.startswith("**"):
            changed = {key: value for key, value in entry.items() if entries[name].get(key) != value}
            report(f"{name} (seed {seed}, {number}): {found}: {changed}")
        elif found.startswith("refused"):
            report(f"{name} (seed {seed}, {number}): {found}")
    return counts


def run_published(parts: Sequence[str], report: Callable[[str], None]) -> Counter[str]:
    """The same of the published models whose names have one of these parts; of all without any."""
    from tests.surveys.published import published, shrunk

    counts = Counter[str]()
    for name, entry in published().items():
        if parts and not any(part in name for part in parts):
            continue
        with tempfile.TemporaryDirectory(prefix="disagg-fuzz-") as folder:
            found = outcome(shrunk(entry), Path(folder) / "model", OF_PUBLISHED)
        counts[found.partition(":")[0]] += 1
        report(f"{name}: {found}")
    return counts


def run_each(names: Sequence[str], report: Callable[[str], None]) -> Counter[str]:
    """The same of every configuration that differs in one value from a known one, by log-probabilities."""
    counts, entries = Counter[str](), known()
    for name in names or entries:
        for change, entry in changed_once(entries[name]):
            with tempfile.TemporaryDirectory(prefix="disagg-fuzz-") as folder:
                found = outcome(entry, Path(folder) / "model", compared=near)
            counts[found.partition(":")[0].partition(" by")[0]] += 1
            if found.startswith(("**", "refused")):
                report(f"{name}, {change}: {found}")
    return counts


if __name__ == "__main__":
    from disagg.engines.process import exit_without_cleanup

    parser = argparse.ArgumentParser()
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("given", nargs="*", metavar="COUNT, NAME")
    asked = parser.parse_intermixed_args()

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if asked.published:
        made = run_published(asked.given, report)
    elif asked.each:
        made = run_each(asked.given, report)
    else:
        made = run(int(asked.given[0]), asked.seed, asked.given[1:], report)
    print(dict(made), flush=True)
    exit_without_cleanup(0)
