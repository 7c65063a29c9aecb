"""disagg: prefill on NVIDIA, decode on Apple, one LLM server.

`Client` and `AsyncClient` run requests on a fleet; docs/python-api.md describes them. `disagg --help` shows the command
line.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's, without the import: Ctrl-C would give a traceback while it lasts
if TYPE_CHECKING:
    from typing import Any

    from disagg import errors
    from disagg.inference.client import AsyncClient, Client
    from disagg.inference.metrics import Metrics
    from disagg.inference.stream import AsyncStream, Stream
    from disagg.inference.types import Chunk, Completion, PromptScores
    from disagg.version import VERSION as __version__

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "Metrics",
    "PromptScores",
    "Stream",
    "__version__",
    "errors",
]

_MODULES = {
    "AsyncClient": "disagg.inference.client",
    "AsyncStream": "disagg.inference.stream",
    "Chunk": "disagg.inference.types",
    "Client": "disagg.inference.client",
    "Completion": "disagg.inference.types",
    "Metrics": "disagg.inference.metrics",
    "PromptScores": "disagg.inference.types",
    "Stream": "disagg.inference.stream",
}

if not TYPE_CHECKING:  # type checkers read the imports above, and report names that do not exist

    def __getattr__(name: str) -> Any:
        """Import public names on first use: `import disagg` alone loads no HTTP library."""
        if name == "errors":
            return importlib.import_module("disagg.errors")
        if name == "__version__":
            return importlib.import_module("disagg.version").VERSION
        if name not in _MODULES:
            raise AttributeError(f"module 'disagg' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return sorted(__all__)
