"""Names that several contracts, hosts.toml and the KV transfer share. Imports nothing, so that the command line can
complete arguments without msgspec."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

Role = Literal["prefill", "decode", "whole", "gateway"]
"""What a host does. whole: it answers whole requests, and its server is another program than disagg's. A gateway runs
no model: it answers clients by requests to the other hosts."""
RequestPhase = Literal["queue", "loading", "prefill", "transfer", "decode"]
"""queue: waiting for a host. loading: a host of it loads the model. prefill: the prompt is computed; its KV crosses
meanwhile. transfer: the prompt is computed, its KV is not yet there. decode: the answer is generated."""
WireForm = Literal["as-is", "int8-g64"]
"""The form in which keys and values are sent: unchanged, or quantised to eight bits; see disagg.api.layout. hosts.toml
and the command line say "int8"."""
SplitWord = Literal["auto", "off"]
"""Instead of a number of layers that a prefill host computes of a prompt."""
AS_IS: Final = "as-is"
INT8: Final = "int8-g64"
WIRE_FORMS: Final[tuple[WireForm, ...]] = (AS_IS, INT8)
KV_WHOLE: Final = 4
"""The version of the KV protocol whose transfers have one digest, at their end, and the KV of all layers."""
KV_CHUNKS: Final = 5
"""That in which each chunk of the prompt has a digest of its own, and which can have the first layers only."""
DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})
LOG_FILE_VARIABLE: Final = "DISAGG_LOG_FILE"
"""Names the file that is a server's stdout and stderr, so that the server can rotate it."""
KEEPER_VARIABLE: Final = "DISAGG_KEEPER"
"""The descriptor of the connection to its keeper, of the process of one model of a host with several."""
LOG_BYTES: Final = 64 << 20
"""A server renames its log to LOG.1 once it is longer than this."""
