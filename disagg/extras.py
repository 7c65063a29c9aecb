"""The extras of disagg in pyproject.toml: which packages they bring, and the command that installs them.

disagg is on no package index: a hint that named one would have somebody else's package installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from disagg.errors import UsageError
from disagg.version import VERSION

_SERVER: Final = ("numpy", "starlette", "uvicorn", "xxhash")
MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "server": _SERVER,
    "gateway": ("prometheus_client", "starlette", "uvicorn"),
    "structured": ("llguidance",),
    "prefill": (*_SERVER, "torch", "transformers"),
    "decode": (*_SERVER, "mlx", "mlx_lm"),
    "vllm": (*_SERVER, "vllm"),
}
"""The modules without which the programs of an extra do not start."""
IMPORTED: Final[Mapping[str, tuple[str, ...]]] = {
    "prefill": ("torch", "transformers"),
    "quantize": ("torchao",),
    "vllm": ("torch", "vllm"),
    "decode": ("mlx.core", "mlx_lm"),
    "gateway": ("starlette", "uvicorn"),
}
"""The modules of an extra whose import shows that an environment fits its machine."""
DISK_BYTES: Final[Mapping[str, int]] = {"prefill": 9 << 30, "vllm": 14 << 30, "decode": 3 << 30, "gateway": 256 << 20}
"""The disk that an environment with an extra needs while it is built: torch has CUDA's libraries, mlx transformers."""


def install(*extras: str) -> str:
    """The command that installs these extras."""
    return f"pip install '.[{','.join(extras)}]' in a clone of disagg {VERSION}"


def require(*extras: str) -> None:
    """UsageError, with the command, unless this Python has the modules of these extras."""
    extras = tuple(dict.fromkeys(extras))
    wanted = dict.fromkeys(module for extra in extras for module in MODULES[extra])
    if missing := [module for module in wanted if importlib.util.find_spec(module) is None]:
        raise UsageError(f"not installed here: {', '.join(missing)}", install(*extras))


def explained(error: ModuleNotFoundError) -> Exception:
    """UsageError, with the command, for a module that an extra brings; else the error itself, which is a fault."""
    extra = next((extra for extra, modules in MODULES.items() if error.name in modules), None)
    return error if extra is None else UsageError(f"not installed here: {error.name}", install(extra))
