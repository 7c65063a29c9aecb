"""What `import disagg` offers."""

from __future__ import annotations

import subprocess
import sys

import disagg


def test_dir_shows_the_public_names_only() -> None:
    assert dir(disagg) == [
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
    assert all(getattr(disagg, name) is not None for name in dir(disagg))


def test_importing_the_package_loads_neither_http_nor_the_client() -> None:
    program = "import sys, disagg; disagg.errors; print({'httpx', 'anyio', 'disagg.inference'} & sys.modules.keys())"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "set()\n"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    assert not hasattr(disagg, "Clinet")
