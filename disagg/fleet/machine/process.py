"""Processes on this machine: spawn detached, identify, end; which ports are in use, and by whom.

The kernel reuses process ids, so a process is identified by its pid and its start time (`identity`). No function here
signals a process whose identity differs from the recorded one.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from disagg.errors import DisaggError, FleetError

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Servers that this process spawned: as their parent it must reap them, or they remain zombies."""


def spawn(argv: Sequence[str], log: Path, environment: Mapping[str, str], *, own_session: bool = True) -> int:
    """Start a process, in a process group of its own, with its output in `log`. Returns its pid.

    environment: added to this process's own. own_session: it is detached from the terminal. Linux shares the cores
    between sessions first, and looks at the priorities of threads within a session only. The log of the previous run is
    kept as <log>.1.
    """
    try:
        if log.exists():
            log.replace(log.with_name(log.name + ".1"))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FleetError(
            f"cannot write {log}: {error.strerror}", "check that folder, its owner and its disk"
        ) from error
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=own_session,
            process_group=None if own_session else 0,
            cwd=log.parent,
            env={**os.environ, **environment},
        )
    except OSError as error:
        raise FleetError(
            f"cannot run {argv[0]}: {error.strerror}", "check `python` of this host in hosts.toml"
        ) from error
    finally:
        os.close(descriptor)
    _children[process.pid] = process
    return process.pid


def python_command(python: str | None) -> tuple[list[str], dict[str, str]]:
    """How to run a module of disagg: argv up to `-m`, and the environment it needs. python: None for this interpreter.

    -P keeps the working folder off sys.path, where a stray http.py would break the server. With this interpreter the
    child also gets this package, whether or not it is installed.
    """
    if python is not None:
        return [python, "-P", "-m"], {}
    package_root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
    return [sys.executable, "-P", "-m"], {"PYTHONPATH": path}


def identity(pid: int) -> str | None:
    """A process's start time, in a form that clock changes do not alter; None if it does not run, or is a zombie."""
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]
        return None
    if sys.platform == "linux":
        return _linux_identity(pid)
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.6f}"
    except psutil.NoSuchProcess:
        return None


def _linux_identity(pid: int) -> str | None:
    """Boot id and start tick: psutil's create_time() changes when the wall clock is set, these do not.

    A killed process is a zombie with threads until the last of them has ended, and holds its ports until then.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, threads, start_tick = fields[0], int(fields[17]), fields[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return None if state in "ZX" and threads <= 1 else f"{boot}:{start_tick}"


def end(pid: int, expected: str, grace_s: float) -> bool:
    """End the process group that `spawn` made: SIGTERM, then SIGKILL after `grace_s`. Returns whether it was killed.

    Does nothing if `pid` is no longer the process with the expected identity.
    """
    if identity(pid) != expected:
        return False
    for kind, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(pid, kind)
        except ProcessLookupError:
            return kind == signal.SIGKILL
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if identity(pid) != expected:
                return kind == signal.SIGKILL
            time.sleep(0.02)
    raise FleetError(
        f"process {pid} did not end after SIGKILL", "it hangs in the kernel (a device or network file system)"
    )


def port_taken(address: str, port: int) -> bool:
    """Whether another program listens on address:port. Raises FleetError if no program can listen there."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return True
        hint = 'a host with connector "local" needs an address of this machine, for example 127.0.0.1'
        if error.errno == errno.EACCES:
            hint = "choose a port above 1023"
        raise FleetError(f"cannot listen on {address}:{port}: {error.strerror}", hint) from error
    return False


def port_holder(port: int) -> str:
    """The program that listens on a port, as "name (pid N)"; "another process" if only root may see it."""
    try:
        listening = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS: only root may read it
        return "another process"
    for connection in listening:
        here = connection.status == psutil.CONN_LISTEN and getattr(connection.laddr, "port", None) == port
        if here and connection.pid:
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.NoSuchProcess:
                continue
    return "another process"


def listens(pid: int, port: int) -> bool:
    """Whether a process of this user listens on a port."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(one.status == psutil.CONN_LISTEN and getattr(one.laddr, "port", None) == port for one in connections)


def run_json(argv: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Run a command that prints one JSON object, and return it; `{"error": ...}` is raised as the error it describes.

    The command's process group is killed on a timeout or an interruption.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, **environment},
        text=True,
        errors="replace",
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise FleetError(f"no result after {timeout_s:g} s", "allow more time: --timeout SECONDS") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a grandchild in another session may hold the pipes open
                process.communicate(timeout=5)
    return _one_object(out, err, process.returncode)


def _one_object(out: str, err: str, exit_code: int) -> dict[str, Any]:
    try:
        body = json.loads(out)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        tail = "\n".join((err.strip() or out.strip() or "(no output)").splitlines()[-20:])
        raise FleetError(f"the process exited with code {exit_code} and no result; its last output:\n{tail}")
    if isinstance(body.get("error"), dict):
        raise DisaggError.from_json(body["error"])
    return body
