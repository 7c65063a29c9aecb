"""Programs that are forked from a process with their imports done, which saves seconds of each server's start.

`python -m tests.preloaded transformers` is that process, `vllm` in the environment of that, or `disagg` for the command
line. It reads requests and writes replies, one JSON object per line: {"program", "argv", "env", "log", "errors",
"network"} starts `python -m PROGRAM ARGV` and is answered with {"pid"}; {"pid"} is answered with {"code"}, null while
that program runs. At the end of its input it kills what still runs. MLX is imported after the fork: it starts threads,
and no thread survives a fork.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.threads import name_threads_in_the_system

_CLONE_NEWNET = 0x40000000
AVAILABLE = sys.platform == "linux"
_SERVERS = ("disagg.servers.run", "disagg.servers.prefill.service")
_MODULES = {
    "disagg": (
        "disagg.cli.app",
        "disagg.cli.views",
        "disagg.fleet.deploy.deployment",
        "disagg.fleet.lifecycle.fleet_servers",
        "disagg.fleet.machine.ssh.machine",
        "disagg.inference.client",
        "fabric",
        "rich.live",
    ),
    "transformers": (
        "disagg.engines.transformers.engine",
        *_SERVERS,
        # What transformers imports when it loads a model, torch._dynamo and sympy with it: 2 s of CPU time.
        "transformers.modeling_layers",
        "transformers.modeling_utils",
        "transformers.masking_utils",
        "transformers.tokenization_utils_tokenizers",
    ),
    # 13 s of CPU time.
    "vllm": (
        "disagg.engines.vllm.engine",
        "disagg.engines.vllm.connector",
        "disagg.engines.vllm.profile",
        *_SERVERS,
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
    ),
}
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Preloaded:
    """The process with the frameworks. Its servers compute with one thread. variables: of its environment. python: of
    the environment with `framework`."""

    def __init__(
        self,
        variables: Mapping[str, str] = MappingProxyType({}),
        python: str = sys.executable,
        framework: str = "transformers",
    ) -> None:
        self._lock = threading.Lock()
        command = [python, "-m", "tests.preloaded", framework]
        environment = {**os.environ, **_ONE_THREAD, **variables, "PYTHONPATH": str(Path(__file__).parents[1])}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        network: str = "",
        program: str = "disagg.servers",
        *,
        errors: Path | None = None,
    ) -> ForkedServer:
        """network: the file of a network namespace, "" for this process's own. program: the module to run. errors:
        stderr, if not in the log."""
        request = {"argv": list(argv), "env": dict(environment), "log": str(log), "errors": str(errors or log)}
        return ForkedServer(self, int(self.ask({**request, "network": network, "program": program})["pid"]))

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


class ForkedServer:
    """What tests use of a Popen, for a server that is not a child of this process."""

    def __init__(self, parent: Preloaded, pid: int) -> None:
        self._parent = parent
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask({"pid": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline, pause = time.monotonic() + timeout, 0.002
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("disagg", timeout)
            time.sleep(pause)
            pause = min(0.05, pause * 1.3)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> None:
    for module in _MODULES[sys.argv[1]]:
        importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads run, and a fork keeps one"
    codes: dict[int, int | None] = {}
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(json.loads(line), codes)) + "\n")
        sys.stdout.flush()
    for pid in (pid for pid, code in codes.items() if code is None):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _answer(request: Mapping[str, Any], codes: dict[int, int | None]) -> dict[str, int | None]:
    if "argv" in request:
        pid = _fork(request)
        codes[pid] = None
        return {"pid": pid}
    pid = request["pid"]
    if codes[pid] is None:
        codes[pid] = _exit_code(pid)
    return {"code": codes[pid]}


def _exit_code(pid: int) -> int | None:
    """The code of a server that ended, negative for a signal, as of Popen."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(request: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    log, errors = (os.open(request[name], os.O_WRONLY | os.O_APPEND | os.O_CREAT) for name in ("log", "errors"))
    for target, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, errors)):
        os.dup2(descriptor, target)
    if request["network"]:
        with Path(request["network"]).open("rb") as namespace:
            enter_network(namespace.fileno())
    os.environ.clear()
    os.environ.update(request["env"])
    name_threads_in_the_system()
    sys.argv = [request["program"], *request["argv"]]
    sys.path += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    code = 1
    try:
        runpy.run_module(request["program"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:  # a server ends by itself, without coming back here
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def enter_network(descriptor: int) -> None:  # os.setns is from Python 3.12 on
    """Move this thread into a network namespace. Threads and processes inherit it from their maker."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    main()
