"""Whether a model can be handed over, by its config.json alone: what disagg's own survey found for its type.

verdicts.toml is written by `python -m tests.surveys`. It holds for the versions in SERIES. A model is refused by its
configuration by the same rules as when it is loaded (refusals.py); what else a checkpoint states is compared then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, Protocol

import tomli

from disagg.planning.refusals import (
    Config,
    damaged,
    for_context,
    known_as,
    longest_context,
    packing,
    refusal,
    refusal_of_context,
    refusal_of_vllm,
    refusal_of_weights,
    rope_type,
)

State = Literal["exact", "patched", "near", "refused", "unknown"]
"""exact: the answers are those of each framework alone. patched: they are, because disagg sets one of them right. near:
they are as near to those in half precision as the frameworks' own."""

SERIES: Final[Mapping[str, str]] = {"transformers": "5.23", "mlx-lm": "0.32", "vllm": "0.32"}
"""The minor series of each package that computes."""
FILE: Final = Path(__file__).with_suffix(".toml")
VERDICTS: Final[Mapping[str, Mapping[str, Any]]] = tomli.loads(FILE.read_text(encoding="utf-8"))
"""By the model type of a config.json: `transformers` and `vllm`, each the state and then why, and `served` if real
servers were compared. `text`: the model types of the part that reads text, if those are others. `defaults` and
`names`: of the keys that decide, what transformers has if config.json leaves them out, and what config.json calls
them."""
VERIFIED: Final = frozenset(
    text for name, one in VERDICTS.items() if one.get("served") for text in str(one.get("text", name)).split()
)
"""The architectures whose hand-off disagg's own tests compare with both frameworks alone, in float32."""
_STATES: Final[Mapping[str, State]] = {"exact": "exact", "patched": "patched", "near (bfloat16)": "near"}
"""Of models that are handed over, by the first words of an entry."""
_READ_ALONE: Final = ("", "fp8", "mxfp4", "torchao")
"""Forms of packed weights that transformers reads with the packages that disagg installs."""
_AT_LOAD: Final = "on CUDA it is checked when it loads"
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {"kimi_k25": ("kimi_k2",)}
"""By the type of a whole model: what config.json calls its part that reads text, and transformers does not."""
_OTHER_ROPES: Final[Mapping[str, Mapping[str, str]]] = {
    "phi3": {"su": "longrope", "yarn": "longrope"},
    "qwen2_5_vl_text": {"mrope": "default"},
    "qwen2_vl_text": {"mrope": "default"},
}
"""By the type of the part that reads text: what transformers takes the rope types of its config.json for."""
_STRETCHED: Final = ("llama3", "longrope", "yarn")
"""Rotary embeddings to which transformers adds original_max_position_embeddings."""
_OTHER_MODEL, _OTHER_ENGINE = "use another model", "use the engine transformers for this model"


@dataclass(frozen=True, slots=True)
class Verdict:
    """why: of a refusal, or what is not known. instead: what to use then. sure: whether a refusal follows from
    config.json. Another one is what a framework did with a tiny model of this type."""

    model_type: str
    state: State
    why: str = ""
    instead: str = ""
    sure: bool = False

    def __str__(self) -> str:
        return f"{self.state}: {self.why}" if self.why else self.state


class Engine(Protocol):
    """The engine of a host: its options in hosts.toml."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def tensor_parallel(self) -> int: ...


def verdict(config: Mapping[str, Any], engine: Engine, context: int = 0) -> Verdict:
    """The verdict on the model with this config.json on an engine. Of mlx it is that of transformers: it decodes what
    either sends. context: tokens with which it is served, as hosts.toml has it; 0: as many as it reads."""
    outer, part = config.get("model_type"), config.get("text_config")
    kind = known_as(outer) if isinstance(outer, str) else ""
    if why := damaged(config):
        return Verdict(kind, "refused", f"config.json: {why}", "compare config.json with the model's original", True)
    try:
        text = stated(part if isinstance(part, Mapping) else config, kind, context)
        why, instead = _refusal(config, text, engine, context)
    except (TypeError, ValueError, ArithmeticError):
        return Verdict(kind, "unknown", "its config.json is of an unknown form: it is checked when it loads")
    if why:
        return Verdict(kind, "refused", why, instead, True)
    found = _of_type(kind, text.model_type)
    if found.state not in _STATES.values():  # what is not handed over with transformers is not tried with vLLM
        return found
    if engine.name == "transformers" and (form := packing(config)) not in _READ_ALONE:
        needed = f"transformers reads weights in the form {form} with a package that disagg does not install"
        return Verdict(kind, "unknown", needed)
    return _of_vllm(kind, engine.device) if engine.name == "vllm" else found


def stated(config: Mapping[str, Any], outer: str = "", context: int = 0) -> Config:
    """The part of a config.json that reads text as attributes, in transformers' names and with its defaults. outer: the
    model type of the whole. context: tokens with which it is served."""
    inner = config.get("model_type")
    named = isinstance(inner, str) and inner not in (outer, *_OTHER_NAMES.get(outer, ()))
    text = known_as(str(inner if named else _texts(outer)[0]))
    entry = _entry(text)
    renamed = {key: config[own] for key, own in entry.get("names", {}).items() if own in config}
    given = {**entry.get("defaults", {}), **config, **renamed, "model_type": text}
    rope = given.get("rope_parameters") or given.get("rope_scaling")
    if isinstance(rope, Mapping):
        rope = _rope(rope, given)
        rope = for_context(rope, context) if context else rope
    given["rope_parameters"] = rope
    return _attributes({key: value for key, value in given.items() if isinstance(key, str)})


def verified(architecture: str, versions: Mapping[str, str]) -> bool:
    """Whether the tests have compared this architecture on these versions of an engine's packages. A model of another
    one is served if the preflight finds no difference, but marked: `disagg verify` compares its answers."""
    known = all(versions[name].startswith(f"{series}.") for name, series in SERIES.items() if name in versions)
    return known and architecture in VERIFIED


def _rope(stated: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rotary embedding in transformers' names, and with the context before it was stretched, which config.json may
    state beside it or leave out. Sets for each kind of layer have both already."""
    if any(isinstance(one, Mapping) for one in stated.values()):
        return stated
    kind = rope_type(stated)
    kind = _OTHER_ROPES.get(str(config["model_type"]), {}).get(kind, kind)
    if kind not in _STRETCHED:
        return {**stated, "rope_type": kind}
    key, whole = "original_max_position_embeddings", config.get("max_position_embeddings")
    return {**stated, "rope_type": kind, key: config.get(key) or stated.get(key) or whole}


def _attributes(values: Mapping[str, Any] | None) -> Config:
    return SimpleNamespace(**(values or {}))


def _entry(model_type: str) -> Mapping[str, Any]:
    return VERDICTS.get(model_type, {})


def _refusal(config: Mapping[str, Any], text: Config, engine: Engine, context: int) -> tuple[str, str]:
    """Why it is refused by its configuration, and what to use instead; empty if it is not."""
    if why := refusal(text, _attributes(_entry(text.model_type).get("defaults")), known_as(str(config["model_type"]))):
        return why, _OTHER_MODEL
    if why := refusal_of_context(text, context):
        return why, f"set context to {longest_context(text)} or less in hosts.toml"
    if why := refusal_of_weights(config, engine.name):
        return why, "name another checkpoint as this engine's source in hosts.toml"
    with_vllm = engine.name == "vllm"
    return (refusal_of_vllm(text, engine.device, engine.tensor_parallel) if with_vllm else "", _OTHER_ENGINE)


def _texts(outer: str) -> list[str]:
    """The model types of the part that reads text with which a whole model was compared."""
    return str(_entry(outer).get("text", outer)).split() or [outer]


def _of_type(outer: str, text: str) -> Verdict:
    """The verdict on all models of a type, with transformers and mlx-lm."""
    entry = _entry(outer)
    state, _, why = str(entry.get("transformers", "")).partition(": ")
    if state in _STATES:
        if text != outer and text not in _texts(outer):
            return Verdict(outer, "unknown", f"with a part of type {text} it was not compared: disagg verify does")
        return Verdict(outer, _STATES[state])
    if state == "refused":
        return Verdict(outer, "refused", why, _OTHER_MODEL, True)
    if state:
        framework = "mlx-lm" if "mlx-lm" in why else "transformers"
        cannot = f"{framework} {SERIES[framework]} cannot load models of this type"
        return Verdict(outer, "refused", cannot, _OTHER_MODEL)
    both = " and ".join(f"{name} {SERIES[name]}" for name in ("transformers", "mlx-lm"))
    return Verdict(outer, "refused", f"{both} do not both know this model type", _OTHER_MODEL)


def _of_vllm(outer: str, device: str) -> Verdict:
    """The verdict on all models of a type that transformers and mlx-lm serve, with vLLM, whose CPU build was tried."""
    state, _, why = str(_entry(outer).get("vllm", "")).partition(": ")
    on_cuda = device != "cpu"
    if state in _STATES:
        return Verdict(outer, _STATES[state], "tried on a CPU" if on_cuda else "")
    if state == "refused":
        return Verdict(outer, "refused", why, _OTHER_ENGINE, True)
    if not state:
        return Verdict(outer, "unknown", "it was not tried with vLLM: it is checked when it loads")
    if on_cuda:
        return Verdict(outer, "unknown", f"vLLM's CPU build cannot run models of this type; {_AT_LOAD}")
    return Verdict(outer, "refused", f"vLLM {SERIES['vllm']} cannot run models of this type on a CPU", _OTHER_ENGINE)
