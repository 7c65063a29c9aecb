"""Every other model type that both frameworks know, tried once with a tiny random model, in a process of its own with a
limit on its time.

The model is made from transformers' default configuration for the type, shrunk (tests/surveys/shrink.py); its KV is
handed over from one engine to the other in that process, and the answers are compared with those of each framework
alone. Takes about ten seconds per model type."""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from disagg.engines.process import exit_without_cleanup
from tests.surveys.tables import known, short

LIMIT_S = 240.0
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


def tried(name: str) -> str:
    """What became of a model type: the cells of its row after the name. In a process of its own."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_try, args=(name, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(LIMIT_S):
            return str(ours.recv())
        return f"**not answered** within {LIMIT_S:g} s | "
    except EOFError:
        process.join(5)
        return f"**ended** with exit code {process.exitcode} | "
    finally:
        process.kill()
        process.join()


def _try(name: str, answer: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="disagg-survey-") as folder:
        found = outcome(name, Path(folder) / "model")
    answer.send(found)
    exit_without_cleanup(0)  # mlx's threads may abort a process at its end


def outcome(name: str, folder: Path) -> str:
    """What became of it, tried here."""
    from tests.engines.architectures.pairs import loaded, make

    if not has_text_class(name):
        return "refused: transformers has no class for its text part alone | "
    try:
        make(tiny(name), folder)
    except Exception as error:  # noqa: BLE001 - the row says which
        return f"no tiny model could be built: {type(error).__name__}: {short(str(error), folder)} | "
    try:
        with loaded(folder) as pair:
            return compared(pair)
    except Exception as error:  # noqa: BLE001 - the row says which
        from disagg.errors import DisaggError

        kind = "refused" if isinstance(error, DisaggError) else f"**error** {type(error).__name__}"
        return f"{kind}: {short(str(error), folder)} | "


def has_text_class(name: str) -> bool:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(CONFIG_MAPPING[name]().get_text_config(decoder=True)) in MODEL_FOR_CAUSAL_LM_MAPPING


def tiny(name: str) -> dict[str, Any]:
    """config.json of a tiny model of this type, in the hub's form; of a multimodal one, with the text part only."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from tests.surveys.shrink import shrunk

    whole = CONFIG_MAPPING[name]()
    text = whole.get_text_config(decoder=True)
    part = shrunk(text.to_dict())
    if text is whole:
        return {**part, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]}
    parts = {"model_type": name, "text_config": part, "vocab_size": part["vocab_size"]}
    return {**parts, "tie_word_embeddings": bool(part.get("tie_word_embeddings"))}


def compared(pair: Any) -> str:
    """Answers after a hand-off compared with each framework alone, and the largest difference of log-probabilities."""
    from tests.engines.mlx.mlx_parts import prompt, start

    found, prompts = "exact", {length: prompt(length, seed=length) for length in LENGTHS}
    handed_over = {
        length: start(pair.decode, tokens, pair.kv(tokens), max_tokens=TOKENS) for length, tokens in prompts.items()
    }
    for length, tokens in prompts.items():
        answer = handed_over[length].result()
        alone = start(pair.decode, tokens, max_tokens=TOKENS).result()
        if answer != pair.greedy(tokens, answer):
            which = "also without a hand-off" if alone != pair.greedy(tokens, alone) else "by the hand-off"
            found = f"**differs** from transformers at {length} tokens, {which}"
            break
        if answer != alone:
            found = f"**differs** from mlx-lm at {length} tokens"
            break
    difference = pair.difference(prompt(200, seed=200), prompt(TOKENS, seed=1))
    return f"{found} | {difference:.0e}"
