"""Real fleets for tests: hosts.toml on free loopback ports, real server processes, stopped whatever happens."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from disagg.config import Fleet, Host, load
from disagg.engines.vllm.load import ENVIRONMENT
from disagg.fleet.machine.process import python_command
from disagg.inference.client import Client
from disagg.token import MEMORY_FOLDER_VARIABLE, TOKEN_FILE_VARIABLE
from tests import preloaded
from tests.deadlines import wait_until
from tests.ports import free_ports, free_range
from tests.preloaded import ForkedServer, Preloaded

TOKEN = "test-token-of-sixteen-or-more"
START_S = 90.0
VLLM_START_S = 1200.0  # 15 CPU seconds, 45 with two ranks, on a machine that may do ten other things
STOP_S = 60.0
VLLM_PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
"""Of the environment with vLLM, which `make test` sets up."""
VLLM_VARIABLES = {
    **ENVIRONMENT,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONPATH": str(Path(__file__).parent / "stand_ins"),
}
"""Nothing is compiled: g++ would take longer than the tests. torchvision: see tests/stand_ins."""


def _vllm_missing() -> str:
    if not (VLLM_PYTHON.parents[1] / ".ready").exists():
        return "no environment with vLLM: make .venv-vllm/.ready"
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return "vLLM's CPU build needs libnuma.so.1: sudo apt-get install libnuma1"
    return ""


VLLM_MISSING = _vllm_missing()
"""Why no server with vLLM can run here; "" if one can."""
needs_vllm = pytest.mark.skipif(bool(VLLM_MISSING), reason=VLLM_MISSING)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs, if not beside the tests. network: the file of its network namespace. variables: more of its
    environment. parent: the process that forks it."""

    network: str
    variables: Mapping[str, str]
    parent: Preloaded


@dataclass(slots=True)
class RunningFleet:
    """A fleet whose servers answer. `processes` and `places` by host name. lies: of tests.hostile.peers, by the name of
    the prefill host that tells it. program: the module that serves the other hosts. forks: servers are forked from a
    process with their imports done, where that can be."""

    fleet: Fleet
    folder: Path
    places: Mapping[str, Place] = field(default_factory=dict)
    lies: Mapping[str, str] = field(default_factory=dict)
    program: str = "disagg.servers"
    forks: bool = preloaded.AVAILABLE
    processes: dict[str, subprocess.Popen[bytes] | ForkedServer] = field(default_factory=dict)

    def client(self) -> Client:
        return Client(self.fleet, token=TOKEN)

    def http(self, host: str, token: str = TOKEN) -> httpx.Client:
        """A bare HTTP client of one server."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = self.fleet.hosts[host].url
        # verify=False: else each client reads the certificates of the whole web, and polls make many clients.
        return httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False, verify=False)

    def status(self, host: str) -> dict[str, Any]:
        with self.http(host) as http:
            answer = http.get("/status")
            assert answer.status_code == httpx.codes.OK, answer.text
            return dict(answer.json())

    def log(self, host: str) -> str:
        return (self.folder / f"{host}.log").read_text()

    def start(self, host: Host) -> None:
        """Start the server of one host; does not wait."""
        (self.folder / "token").chmod(0o600)
        arguments = ["--config", str(self.fleet.path), "--host", host.name]
        own = {TOKEN_FILE_VARIABLE: str(self.folder / "token"), MEMORY_FOLDER_VARIABLE: str(self.folder / "memory")}
        environment = {
            **os.environ,
            **own,
        }  # fleets of tests that run at the same time do not count each other's memory
        log = self.folder / f"{host.name}.log"
        if place := self.places.get(host.name):
            environment |= place.variables
            self.processes[host.name] = place.parent.start(arguments, environment, log, place.network)
            return
        light = host.simulated or host.engine.name == "vllm-server"
        forks = self.forks and (light or (host.engine.threads == 1 and host.engine.name in ("transformers", "mlx")))
        program = self.program
        if host.keeps:
            program = "tests.keeper.forking" if forks else "disagg.keeper"
        if host.name in self.lies:
            program, environment = "tests.hostile.peers", {**environment, "DISAGG_LIE": self.lies[host.name]}
        if forks:
            self.processes[host.name] = preloaded_process().start(arguments, environment, log, program=program)
            return
        if self.forks and not host.keeps and host.engine.threads == 1 and host.engine.name == "vllm":
            self.processes[host.name] = vllm_process().start(arguments, environment, log)
            return
        with log.open("ab") as output:
            self.processes[host.name] = subprocess.Popen(
                [python_of(host), "-m", program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def wait_ready(self, host: Host) -> None:
        """Until the host's model is loaded; fails with its log where the process ends first."""
        limit = VLLM_START_S if host.engine.name == "vllm" else START_S
        wait_until(lambda: self._ready(host), limit, f"{host.name} to be ready")

    def _ready(self, host: Host) -> bool:
        assert self.processes[host.name].poll() is None, f"{host.name} ended:\n{self.log(host.name)}"
        try:
            return bool(self.status(host.name)["status"] == "ok")
        except httpx.TransportError:
            return False

    def stop(self, name: str) -> int:
        """SIGTERM one server and wait for its end."""
        process = self.processes.pop(name)
        process.terminate()
        return _wait(process)

    def stop_all(self) -> None:
        """SIGTERM all servers, once each, since a second one ends a server without its drain; wait for their ends."""
        stopping = list(self.processes.values())
        self.processes.clear()
        with ExitStack() as ends:
            for process in stopping:
                process.terminate()
                ends.callback(_wait, process)


def _wait(process: subprocess.Popen[bytes] | ForkedServer) -> int:
    try:
        return process.wait(STOP_S)
    finally:
        process.kill()
        process.wait()


@contextmanager
def running(
    path: Path,
    *names: str,
    lies: Mapping[str, str] | None = None,
    program: str = "disagg.servers",
    forks: bool = preloaded.AVAILABLE,
) -> Iterator[RunningFleet]:
    """The fleet of this hosts.toml with its servers (or just those named) up; all are stopped at the end. lies,
    program and forks: see RunningFleet."""
    (path.parent / "token").write_text(TOKEN)
    (path.parent / "token").chmod(0o600)
    fleet = RunningFleet(load(path), path.parent, lies=lies or {}, program=program, forks=forks)
    hosts = [fleet.fleet.hosts[name] for name in names or fleet.fleet.hosts]
    with ExitStack() as stack:
        for host in hosts:
            fleet.start(host)
        stack.callback(fleet.stop_all)
        for host in hosts:
            fleet.wait_ready(host)
        yield fleet


def python_of(host: Host) -> str:
    """The interpreter of a host's engine: vLLM has packages of its own."""
    return str(VLLM_PYTHON) if host.engine.name == "vllm" else sys.executable


def write_hosts(
    folder: Path,
    models: Mapping[str, Path],
    *,
    context: int = 8192,
    prefill_engine: str = "transformers",
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    **host_options: Any,
) -> Path:
    """hosts.toml with one prefill and one decode host per model, named MODEL-prefill and MODEL-decode.

    prefill, decode: engine options of either side. Other keywords go to every host.
    """
    ports = iter(free_ports(3 * len(models)))
    lines = ['[fleet]\nname = "test"']
    for name, path in models.items():
        lines.append(f'[models."{name}"]\ncontext = {context}\naliases = ["alias-of-{name}"]')
        lines.append(f'[models."{name}".sources]')
        lines += [f'{engine} = "{path}"' for engine in dict.fromkeys((prefill_engine, "mlx"))]
        for role, engine, options in (("prefill", prefill_engine, prefill), ("decode", "mlx", decode)):
            lines.append(f'[hosts.{name}-{role}]\naddress = "127.0.0.1"\nport = {next(ports)}\nroles = ["{role}"]')
            lines.append(f'model = "{name}"\nconnector = "local"\nservice = "process"')
            lines += [f"{key} = {_toml(value)}" for key, value in host_options.items()]
            if role == "decode":
                lines.append(f"kv_port = {next(ports)}")
            threads = {} if engine == "vllm-server" else {"device": "cpu", "threads": 1}
            engine_options = {"dtype": "float32", **threads, **(options or {})}
            lines.append(f'[hosts.{name}-{role}.engine]\nname = "{engine}"')
            lines += [f"{key} = {_toml(value)}" for key, value in engine_options.items()]
    path = folder / "hosts.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


KEPT_MODELS: Final = ("llama", "qwen3", "mistral", "gpt_oss")
"""The models of `write_kept_hosts`: architectures of tests.tiny_models."""


def write_kept_hosts(
    folder: Path, models: Mapping[str, Path], *, prefill: int = 2, decode: int = 2, context: int = 4096, **keys: Any
) -> Path:
    """hosts.toml with so many hosts per role, prefill-1 and so on, that have all these models each, with memory for two
    at a time by what is computed of them and by `max_loaded`. keys: of every host, in place of these; None: without
    that key."""
    count = len(models)
    lines = ['[fleet]\nname = "test"']
    for name, path in models.items():
        lines.append(f'[models."{name}"]\ncontext = {context}\n[models."{name}".sources]')
        lines += [f'{engine} = "{path}"' for engine in ("transformers", "mlx")]
    settings: dict[str, Any] = {
        "models": list(models),
        "max_loaded": 2,
        "min_stay": 0,
        "connector": "local",
        "service": "process",
        **keys,
    }
    for role, engine, hosts, kv in (
        ("prefill", "transformers", prefill, "max_held_bytes"),
        ("decode", "mlx", decode, "max_kv_bytes"),
    ):
        for number in range(1, hosts + 1):
            mine = free_range(1 + count * (2 if role == "decode" else 1))
            lines.append(f'[hosts.{role}-{number}]\naddress = "127.0.0.1"\nport = {mine[0]}\nroles = ["{role}"]')
            lines.append(f'ports = "{mine[1]}-{mine[-1]}"')
            own = {"memory_bytes": _ROOM_FOR_TWO[role], **settings}
            lines += [f"{key} = {_toml(value)}" for key, value in own.items() if value is not None]
            lines.append(
                f'engine = {{name = "{engine}", dtype = "float32", device = "cpu", threads = 1, {kv} = {KEPT_KV}}}'
            )
    path = folder / "hosts.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


KEPT_KV: Final = 768 << 20
"""With it a tiny model counts as 0.8 to 1 GiB, and on a decode host, where mlx keeps memory, as 1.8 GiB."""
_ROOM_FOR_TWO: Final = {"prefill": 2 << 30, "decode": 4 << 30}


@cache
def preloaded_process() -> Preloaded:
    """The process that forks servers for all tests of this one."""
    process = Preloaded()
    atexit.register(process.close)
    return process


def preloaded_command() -> tuple[list[str], dict[str, str]]:
    """disagg.fleet.machine.process.python_command for this interpreter, with the frameworks imported already."""
    if not preloaded.AVAILABLE:
        return python_command(None)
    preloaded_process()  # it ends when nobody is connected
    environment = {"PYTHONPATH": str(preloaded.ROOT), preloaded.RUN_VARIABLE: preloaded.run_id()}
    return [sys.executable, "-P", "-m", "tests.preloaded.client"], environment


@cache
def vllm_process() -> Preloaded:
    """The process that forks servers with vLLM."""
    process = Preloaded(VLLM_VARIABLES, str(VLLM_PYTHON), "vllm")
    atexit.register(process.close)
    return process


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, list)) else str(value)
