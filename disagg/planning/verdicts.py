"""Whether a model can be handed over, by its config.json alone: what disagg's own survey found for its type.

verdicts.toml is written by `python -m tests.surveys`. It holds for the versions in SERIES; what a checkpoint states
beyond its type is compared when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import tomli

State = Literal["exact", "patched", "refused", "unknown"]
"""exact: the answers are those of each framework alone. patched: they are, because disagg sets one of them right."""

SERIES: Final[Mapping[str, str]] = {"transformers": "5.23", "mlx-lm": "0.32", "vllm": "0.32"}
"""The minor series of each package that computes."""
FILE: Final = Path(__file__).with_suffix(".toml")
VERDICTS: Final[Mapping[str, Mapping[str, Any]]] = tomli.loads(FILE.read_text(encoding="utf-8"))
"""By the model type of a config.json: `transformers` and `vllm`, each the state and then why, and `served` if real
servers were compared. `text`: the model type of the part that reads text, if that is another one."""
VERIFIED: Final = frozenset(str(one.get("text", name)) for name, one in VERDICTS.items() if one.get("served"))
"""The architectures whose hand-off disagg's own tests compare with both frameworks alone, in float32."""
_GOOD: Final = ("exact", "patched")
_OWN: Final = "cannot be served: "


@dataclass(frozen=True, slots=True)
class Verdict:
    """why: of a refusal, or what is not known."""

    model_type: str
    state: State
    why: str = ""

    @property
    def sure(self) -> bool:
        """Whether a refusal is disagg's own. Another one quotes what a framework said of a tiny model."""
        return self.state == "refused" and _OWN in self.why

    def __str__(self) -> str:
        return f"{self.state}: {self.why}" if self.why else self.state


def verdict(config: Mapping[str, Any], engine: str) -> Verdict:
    """The verdict on the model with this config.json on an engine. Of mlx it is that of transformers: it decodes what
    either sends."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    name = _entry(str(config.get("model_type", "")), str(inner.get("model_type", "")))
    if why := _refusal(inner):
        return Verdict(name, "refused", f"model type {name!r} {_OWN}{why}")
    known = VERDICTS.get(name, {})
    found = str(known.get("transformers", ""))
    if engine == "vllm" and found in _GOOD:  # what is not handed over with transformers is not tried with vLLM
        found = str(known.get("vllm", ""))
    if found in _GOOD:
        return Verdict(name, "exact" if found == "exact" else "patched")
    state, _, why = found.partition(": ")
    if state in ("near (bfloat16)", "not on a CPU"):
        return Verdict(name, "unknown", found)
    if found:
        return Verdict(name, "refused", why)
    return Verdict(name, "unknown", "disagg's tests have not compared this model type: disagg verify does")


def _entry(outer: str, inner: str) -> str:
    """The name in VERDICTS of a model with a part that reads text. The whole model's, unless that was tried with a part
    of another type."""
    whole = VERDICTS.get(outer)
    if whole is not None and (inner not in VERDICTS or whole.get("text", inner) == inner):
        return outer
    return inner if inner in VERDICTS or not outer else outer


def verified(architecture: str, versions: Mapping[str, str]) -> bool:
    """Whether the tests have compared this architecture on these versions of an engine's packages. A model of another
    one is served if the preflight finds no difference, but marked: `disagg verify` compares its answers."""
    known = all(versions[name].startswith(f"{series}.") for name, series in SERIES.items() if name in versions)
    return known and architecture in VERIFIED


def _refusal(config: Mapping[str, Any]) -> str:
    """Why a model is refused whatever its type."""
    if config.get("is_encoder_decoder"):
        return "it is not a decoder alone"
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "") if isinstance(scaling, Mapping) else ""
    if kind == "dynamic":
        return f"rope type {kind!r}: its frequencies change with the length of the prompt"
    return ""
