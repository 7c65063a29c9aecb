"""A Jupyter kernel inside the jail. It is reached over Unix sockets in a folder that both sides see."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from zmq.asyncio import Context
from zmq.constants import SocketOption

from grader.errors import SandboxError
from grader.rubric import Limits
from grader.sandbox import jail

MAX_MESSAGE: Final = 4 << 20
SYSTEM: Final = (
    *(f"/usr/{name}" for name in ("bin", "lib", "lib64", "share", "local/bin", "local/lib")),
    *("/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/fonts", "/etc/alternatives"),
)
GRADER: Final = Path(__file__).resolve().parents[1]
ENVIRONMENT: Final[Mapping[str, str]] = {
    "HOME": jail.HOME,
    "IPYTHONDIR": f"{jail.HOME}/.ipython",
    "LANG": "C.UTF-8",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
}


class JailedKernel(AsyncKernelManager):  # type: ignore[misc,unused-ignore]  # Any, unless it is installed
    """`folder` is empty; it holds the sockets and the specification of the jail."""

    def __init__(self, folder: Path, limits: Limits, data: Path | None) -> None:
        shared = folder / "shared"
        shared.mkdir()
        (folder / "root").mkdir()
        super().__init__(transport="ipc", ip=str(shared / "kernel"), connection_file=str(shared / "kernel.json"))
        # A message that is larger ends the connection: nothing that a notebook prints fills the grader's memory.
        self.context = Context()
        self.context.setsockopt(SocketOption.MAXMSGSIZE, MAX_MESSAGE)
        specification = folder / "jail.json"
        specification.write_text(json.dumps(spec(folder, limits, data)))
        self._argv = [*jailed(specification), "-m", "ipykernel_launcher", "-f", "{connection_file}"]

    def client(self, **options: Any) -> Any:
        client = super().client(**options)
        client.context = self.context
        return client

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [*self._argv, "--HistoryManager.enabled=False"]
        return KernelSpec(argv=argv, display_name="jailed", language="python", env={})


def jailed(specification: Path) -> list[str]:
    """The command line that runs the interpreter of this environment in the jail; its arguments follow."""
    python = interpreter()
    return [python, "-I", "-S", jail.__file__, str(specification), python, "-s", "-P"]


def spec(folder: Path, limits: Limits, data: Path | None) -> jail.Spec:
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return {
        "root": str(folder / "root"),
        "shared": str(folder / "shared"),
        "data": str(data) if data else None,
        "read_only": [*SYSTEM, *libraries(), *packages],
        "hidden": [str(GRADER), *([str(data.parent)] if data else [])],
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "home_bytes": 4 * limits.file_bytes,
        "cpu_seconds": int(limits.notebook_seconds) + 10,
        "processes": limits.processes,
        "environment": {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(packages)},
    }


def libraries() -> list[str]:
    """The interpreter and its standard library, if they are not among the system's."""
    prefix = Path(sys.base_prefix)
    if prefix.is_relative_to("/usr"):
        return []
    return [str(prefix / name) for name in ("bin", "lib") if (prefix / name).is_dir()]


def interpreter() -> str:
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def check_machine() -> None:
    """Raises SandboxError unless this machine can isolate a process."""
    if platform.system() != "Linux":
        raise SandboxError("student code runs in Linux namespaces: run the grader on Linux, or in a Linux container")
