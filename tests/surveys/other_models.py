"""Every other model type that both frameworks know, tried with a tiny random model.

The model is made from transformers' default configuration for the type, shrunk (tests/surveys/shrink.py); its KV is
handed over from one engine to the other in that process, and the answers are compared with those of each framework
alone; what is exact is then served as the other rows are."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.errors import DisaggError
from tests.surveys.tables import FAILS, GOOD, NOT_TRIED, failure, known, short

LENGTHS = (2, 65, 200)
TOKENS = 24


def shared() -> list[str]:
    """The model types that both frameworks know and that have no row in the table of known architectures."""
    from transformers import CONFIG_MAPPING

    models, renamed = mlx_lm_folder() / "models", remapped()
    tested = {str(entry["model_type"]) for entry in known().values()}
    names = sorted(set(CONFIG_MAPPING.keys()) - tested)
    return [name for name in names if (models / f"{renamed.get(name, name)}.py").is_file()]


def mlx_lm_folder() -> Path:
    """Not imported here: mlx's threads would not survive a fork."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def remapped() -> Mapping[str, str]:
    """mlx-lm's MODEL_REMAPPING, read without importing it."""
    tree = ast.parse((mlx_lm_folder() / "utils.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    found: Mapping[str, str] = next(
        ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "MODEL_REMAPPING"
    )
    return found


def cells(name: str, folder: Path) -> dict[str, str]:
    """Of the row of a model type, made here. What is exact in this process is also served. folder: of its own."""
    from tests.surveys import architectures

    found = outcome(name, folder / "model")
    if found in GOOD:
        return architectures.cells(name, tiny(name), folder / "served")
    return {**dict.fromkeys(architectures.COLUMNS, NOT_TRIED), "transformers": found}


def outcome(name: str, folder: Path) -> str:
    """What became of it in this process."""
    from tests.engines.architectures.pairs import loaded, make

    if not has_text_class(name):
        return f"{FAILS}: transformers has no class for its text part alone"
    try:
        make(tiny(name), folder)
    except Exception as error:  # noqa: BLE001 - the row says which
        return f"{FAILS}: transformers cannot build a tiny model: {type(error).__name__}: {short(str(error), folder)}"
    try:
        with loaded(folder) as pair:
            return compared(pair)
    except DisaggError as error:
        return f"{failure(error, folder)}"
    except Exception as error:  # noqa: BLE001 - the row says which
        return f"**error** {type(error).__name__}: {short(str(error), folder)}"


def has_text_class(name: str) -> bool:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    text = CONFIG_MAPPING[name]().get_text_config(decoder=True)
    return type(text) in MODEL_FOR_CAUSAL_LM_MAPPING or (type(text) in MODEL_MAPPING and hasattr(text, "vocab_size"))


def tiny(name: str) -> dict[str, Any]:
    """config.json of a tiny model of this type, in the hub's form; of a multimodal one, with the text part only."""
    from transformers import CONFIG_MAPPING

    from disagg.engines.transformers.load import causal_class
    from tests.surveys.shrink import shrunk

    whole = CONFIG_MAPPING[name]()
    text = whole.get_text_config(decoder=True)
    part = shrunk(text.to_dict())
    if text is whole:
        return {**part, "architectures": [causal_class(text).__name__]}
    parts = {"model_type": name, "text_config": part, "vocab_size": part["vocab_size"]}
    if name == "muse_spark":  # hears with the same width
        parts["audio_config"] = {"out_hidden_size": part["hidden_size"]}
    return {**parts, "tie_word_embeddings": bool(part.get("tie_word_embeddings"))}


def compared(pair: Any) -> str:
    """Answers after a hand-off compared with each framework alone."""
    from tests.engines.mlx.mlx_parts import start
    from tests.surveys.architectures import clear_prompt

    prompts = {length: clear_prompt(pair.decode, length, TOKENS) for length in LENGTHS}
    handed_over = {
        length: start(pair.decode, tokens, pair.kv(tokens), max_tokens=TOKENS) for length, tokens in prompts.items()
    }
    for length, tokens in prompts.items():
        answer = handed_over[length].result()
        alone = start(pair.decode, tokens, max_tokens=TOKENS).result()
        if answer != pair.greedy(tokens, answer):
            which = "also without a hand-off" if alone != pair.greedy(tokens, alone) else "by the hand-off"
            return f"**differs** from transformers at {length} tokens, {which}"
        if answer != alone:
            return f"**differs** from mlx-lm at {length} tokens"
    return "exact"
