"""`python -m tests.preloaded FRAMEWORK SOCKET`: imports what a framework's servers import, then forks programs.

FRAMEWORK: transformers, vllm in the environment of that, or disagg for the command line. A connection to SOCKET gets
"ready" and then carries requests and replies, one JSON object per line: {"program", "argv", "cwd", "env", "input",
"log", "errors", "network"} starts `python -m PROGRAM ARGV` and is answered with {"pid"}, or {"error"}; {"pid"} is
answered with {"code"}, null while that program runs. What a connection has started is killed at its end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from disagg.version import code_hash
from tests.preloaded import READY, enter_network
from tests.preloaded.program import run_and_exit

PATIENCE_S = 60.0
_SERVERS = ("disagg.servers.run", "disagg.servers.prefill.service")
_MODULES: Mapping[str, tuple[str, ...]] = {
    "nothing": (),  # for tests of this program
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
        "transformers.models.auto.tokenization_auto",
        "transformers.models.qwen3.modeling_qwen3",
        "disagg.engines.mlx.engine",  # MLX starts its threads when it first computes
        "disagg.servers.decode.service",
    ),
    # 13 s of CPU time.
    "vllm": (
        "disagg.engines.vllm.engine",
        "disagg.engines.vllm.connector",
        "disagg.engines.vllm.profile",
        *_SERVERS,
        "vllm.entrypoints.cli.main",
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.openai.api_server",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.model_executor.models.llama",
        "vllm.v1.engine.core",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
    ),
}


class Caller:
    """A connection, and the programs that it has started, with their exit codes. sockets: this one's and the others,
    which a program has no use for."""

    def __init__(self, connection: socket.socket, sockets: Mapping[Any, Any]) -> None:
        self.connection = connection
        self._sockets = sockets
        self._lines = connection.makefile("rb")
        self._codes: dict[int, int | None] = {}
        with suppress(ConnectionError):
            connection.sendall(READY)

    def answer(self) -> bool:
        """Read one request and answer it. False at the end of the connection."""
        try:
            line = self._lines.readline()
            if not line.endswith(b"\n"):
                return False
            answer = self._answer(json.loads(line))
            self.connection.sendall(json.dumps(answer).encode() + b"\n")
        except ConnectionError:  # the caller was killed; the others go on
            return False
        return True

    def close(self) -> None:
        for pid in (pid for pid, code in self._codes.items() if code is None):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._lines.close()
        self.connection.close()

    def _answer(self, request: Mapping[str, Any]) -> dict[str, int | str | None]:
        if "argv" in request:
            try:
                pid = _fork(request, self._sockets)
            except OSError as error:  # no memory, or too many processes
                return {"error": f"{' '.join(request['argv'])} cannot be forked: {error}"}
            self._codes[pid] = None
            return {"pid": pid}
        pid = request["pid"]
        if self._codes[pid] is None:
            self._codes[pid] = _exit_code(pid)
        return {"code": self._codes[pid]}


def main() -> None:
    framework, address = sys.argv[1], Path(sys.argv[2])
    listener = _listener(address)
    if listener is None:
        return
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        _import(framework)
        _serve(listener)
        address.with_suffix(".stderr").unlink(missing_ok=True)  # see Preloaded
    finally:
        address.unlink(missing_ok=True)


def _listener(address: Path) -> socket.socket | None:
    """A socket that listens at this address. None if another one is there already."""
    listener = socket.socket(socket.AF_UNIX)
    own = address.with_suffix(f".{os.getpid()}")
    listener.bind(str(own))
    listener.listen(64)
    try:
        os.link(own, address)  # so that nobody finds a socket that does not listen yet
    except FileExistsError:
        listener.close()
        return None
    finally:
        own.unlink()
    return listener


def _import(framework: str) -> None:
    """Import the modules, and compute what each program would compute for itself and keep."""
    gc.disable()
    for module in _MODULES[framework]:
        importlib.import_module(module)
    code_hash()
    if framework == "transformers":
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
    if framework == "vllm":
        from tests.preloaded import vllm_processes

        vllm_processes.import_vllm_once()
    gc.enable()
    gc.freeze()  # else each program's collections look at all that was imported, and copy its pages
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads run, and a fork keeps one"


def _serve(listener: socket.socket) -> None:
    """Until the last caller is gone, or none comes."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        callers = 0
        while True:
            for key, _ in selector.select(PATIENCE_S):
                if key.data is None:
                    caller = Caller(listener.accept()[0], selector.get_map())
                    selector.register(caller.connection, selectors.EVENT_READ, caller)
                    callers += 1
                elif not key.data.answer():
                    selector.unregister(key.fileobj)
                    key.data.close()
                    callers -= 1
            if not callers:
                return


def _exit_code(pid: int) -> int | None:
    """The code of a program that ended, negative for a signal, as of Popen."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(request: Mapping[str, Any], sockets: Mapping[Any, Any]) -> int:
    pid = os.fork()
    if not pid:
        _become(request, sockets)
    return pid


def _become(request: Mapping[str, Any], sockets: Mapping[Any, Any]) -> NoReturn:
    for descriptor in [key.fd for key in sockets.values()]:
        os.close(descriptor)
    try:
        _redirect(request)
        _enter(request)
    except BaseException:  # noqa: BLE001  # as the interpreter would
        traceback.print_exc()
        os._exit(1)
    run_and_exit(request["program"], request["argv"], request["env"])


def _redirect(request: Mapping[str, Any]) -> None:
    log, errors = (os.open(request[name], os.O_WRONLY | os.O_APPEND | os.O_CREAT) for name in ("log", "errors"))
    for target, descriptor in ((0, os.open(request["input"], os.O_RDONLY)), (1, log), (2, errors)):
        os.dup2(descriptor, target)


def _enter(request: Mapping[str, Any]) -> None:
    """The program's network and folder."""
    with Path(request["network"]).open("rb") as namespace:
        if os.fstat(namespace.fileno()).st_ino != Path("/proc/self/ns/net").stat().st_ino:
            enter_network(namespace.fileno())
    os.chdir(request["cwd"])


if __name__ == "__main__":
    main()
