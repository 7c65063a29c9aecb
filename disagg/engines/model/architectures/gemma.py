"""gemma3n: several streams beside the hidden state."""

from __future__ import annotations

from disagg.engines.model.architectures.base import Architecture, Config


def _several_streams(config: Config) -> str:
    return f"its layers pass on {config.altup_num_inputs} hidden states per token"


ARCHITECTURES = {"gemma3n_text": Architecture(split=_several_streams)}
