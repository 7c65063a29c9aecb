"""config.json of one tiny model per architecture, in the form of the hub's: what is added to tiny_models.COMMON.

states    some layers keep a state
layers    latent attention, layers of different sizes, text parts of multimodal models
plain     plain attention
patched   what a framework computes otherwise until it is set right
parts     what several of them share
rewrite   checkpoints in the form of the hub's
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.engines.architectures.configs.layers import SPECIAL_LAYERS
from tests.engines.architectures.configs.patched import PATCHED
from tests.engines.architectures.configs.plain import PLAIN
from tests.engines.architectures.configs.states import WITH_STATES
from tests.tiny_models import COMMON

CONFIGS: Final[Mapping[str, dict[str, Any]]] = {**WITH_STATES, **SPECIAL_LAYERS, **PLAIN, **PATCHED}


def config(name: str) -> dict[str, Any]:
    """The whole config.json of a tiny model."""
    return {**COMMON, "model_type": name, **CONFIGS[name]}
