"""disagg: prefill on NVIDIA, decode on Apple, one LLM server.

`Client` and `AsyncClient` drive a running fleet; `disagg --help` shows the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from disagg.version import VERSION

if TYPE_CHECKING:
    from disagg.inference.client import AsyncClient, Client

__version__ = VERSION
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the client on first use: importing disagg itself stays cheap."""
    if name not in ("AsyncClient", "Client"):
        raise AttributeError(f"module 'disagg' has no attribute {name!r}")
    from disagg.inference import client

    return getattr(client, name)
