"""One host with systemd as its first process: its server is deployed, crashes, and comes back after a reboot.

    python -m benchmarks.reboot [--models]

It needs root, systemd, D-Bus, sudo and a writable cgroup2. Prints a line with its time for each step that holds, and
fails at the first that does not. The host is a set of namespaces (tests/testbed) whose first process is systemd; a
reboot ends them all and makes new ones for the same home.

--models: it becomes a host with several models before the reboot, whose list changes while it serves.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from disagg.config import load
from tests.integration.deployed import ROOT, Operator
from tests.testbed import network
from tests.testbed.bed import Bed, await_sshd, make_client, make_known, namespace_host
from tests.testbed.uv import install_uv

NAME = "spark-1"
PATIENCE_S = 120.0
FLEET = """\
[fleet]
name = "reboot"

[deploy]
installer = "uv"
cuda_on_cpu = true

[models.tiny]
context = 2048
[models.tiny.sources]
transformers = "package:demo/models/qwen3-moe-tiny"

[hosts.spark-1]
address = "169.254.150.11"
roles = ["prefill"]
model = "tiny"
port = 8000
connector = "ssh"
service = "systemd"

[hosts.spark-1.engine]
name = "transformers"
dtype = "float32"
device = "cpu"
threads = 1
"""


def main() -> None:
    if not network.may_make_namespaces():
        raise SystemExit("this needs network namespaces: run it as root")
    with tempfile.TemporaryDirectory(prefix="disagg-reboot-") as name, control_group() as group, network.hub() as hub:
        folder = Path(name)
        folder.chmod(0o755)
        source = folder / "hosts.toml"
        source.write_text(FLEET)
        make_client(folder)
        with switched_on(folder, source, hub, group) as bed, bed.entered():
            first_boot(bed, Operator(bed, source, folder))
            if "--models" in sys.argv[1:]:
                several_models(bed, Operator(bed, source, folder))
        with suppress(subprocess.CalledProcessError):  # else a network may outlive its processes for a moment
            network.in_network(hub, "ip", "link", "del", bed.hosts[NAME].link)
        with switched_on(folder, source, hub, group) as bed, bed.entered():
            second_boot(bed, Operator(bed, source, folder))


def first_boot(bed: Bed, fleet: Operator) -> None:
    step("systemd is up", lambda: booted(bed))
    install_uv(bed)
    refused = fleet.run("deploy", "--yes", code=1)  # an account may not let itself linger there without a password
    assert "sudo loginctl enable-linger spark" in refused.stdout + refused.stderr, refused
    print("deploy names `sudo loginctl enable-linger spark`")
    bed.hosts[NAME].as_root("sh", "-c", "echo 'spark ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/bed")
    prepared = json.loads(fleet.run("bootstrap", NAME, "--yes", "--json", code=1).stdout)["steps"]
    states = {one["name"]: one["state"] for one in prepared}  # without a service that sets the clock
    assert states == {"uv": "in place", "python": "in place", "clock": "failed", "linger": "done"}, prepared
    print("bootstrap lets spark linger, by sudo")
    timed("deploy", lambda: fleet.run("deploy", "--yes"))
    timed("start", lambda: fleet.run("start"))
    pid = serving(fleet)
    os.kill(server(bed), signal.SIGKILL)
    step("systemd has restarted the server that was killed", lambda: serving(fleet) not in (None, pid))
    timed("restart", lambda: fleet.run("restart"))
    note = fleet.run("deploy", "--dry-run").stdout
    assert "reboot" not in note, note


SEVERAL = 'models = ["tiny"]\npreload = ["tiny"]\nport = 8000\nports = "8100-8103"'
OTHER = '[models.other]\ncontext = 2048\nsources = {transformers = "package:demo/models/gpt-oss-tiny"}\n\n[hosts.'


def several_models(bed: Bed, fleet: Operator) -> None:
    text = fleet.config.read_text().replace('model = "tiny"\nport = 8000', SEVERAL)
    fleet.config.write_text(text)
    timed("deploy, with models in place of model", lambda: fleet.run("deploy", "--yes"))
    timed("restart", lambda: fleet.run("restart"))
    step("the keeper has loaded its model", lambda: kept(fleet) == {"tiny": "ready"})
    before = processes(bed)
    fleet.config.write_text(
        text.replace('["tiny"]\npreload', '["tiny", "other"]\npreload').replace("[hosts.", OTHER, 1)
    )
    (done,) = json.loads(fleet.run("deploy", "--yes", "--json").stdout)["hosts"]
    assert done["plan"]["needs"] == "", done
    step("the keeper has read a longer list", lambda: kept(fleet) == {"tiny": "ready", "other": "asleep"})
    assert processes(bed) == before, (before, processes(bed))
    print(f"what ran goes on, as {before}")
    (keeper,) = (pid for pid, host in before.items() if host == NAME)
    os.kill(keeper, signal.SIGKILL)
    step(
        "systemd has restarted the keeper that was killed, and that its model",
        lambda: not before.keys() & processes(bed).keys() and kept(fleet) == {"tiny": "ready", "other": "asleep"},
    )
    assert sorted(processes(bed).values()) == sorted(before.values()), processes(bed)


def processes(bed: Bed) -> dict[int, str]:
    """The keeper and the servers: what each serves, by its id here."""
    found: dict[int, str] = {}
    for one in bed.hosts[NAME].processes():
        with suppress(psutil.Error):
            words = one.cmdline()
            if "disagg.keeper" in words or "disagg.servers" in words:
                found[one.pid] = words[words.index("--host") + 1]
    return found


def kept(fleet: Operator) -> dict[str, str]:
    """The states of the host's models."""
    argv = fleet.argv("status", "--json")
    done = subprocess.run(
        argv, capture_output=True, text=True, env=fleet.environment, cwd=ROOT, timeout=PATIENCE_S, check=False
    )
    (row,) = json.loads(done.stdout)["hosts"]
    return {one["model"]: one["state"] for one in row["models"]}


def second_boot(bed: Bed, fleet: Operator) -> None:
    step("after a reboot, before any login: systemd is up", lambda: booted(bed))
    step("the server serves again, with nobody logged in", lambda: serving(fleet) is not None)
    timed("uninstall", lambda: fleet.run("uninstall", "--yes", "--models"))
    left = [path for path in bed.hosts[NAME].home.rglob("*") if "disagg" in path.name]
    assert not left, left
    print("uninstall left no file of disagg, nor its unit")


@contextmanager
def switched_on(folder: Path, source: Path, hub: subprocess.Popen[bytes], group: Path) -> Iterator[Bed]:
    host, sshd = load(source).hosts[NAME], shutil.which("sshd") or "/usr/sbin/sshd"
    join = ["sh", "-c", f'echo $$ >"{group}/cgroup.procs" && exec "$@"', "sh"]
    with namespace_host(folder, folder / "client", host, sshd, hub, within=join, boots=True) as there:
        with network.inside(hub):
            await_sshd(there)
        make_known(folder / "client", {NAME: there})
        yield Bed(folder, {NAME: there}, folder / "client", hub, True, source)


@contextmanager
def control_group() -> Iterator[Path]:
    """A group of cgroup2 that the host's systemd may divide."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    root = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    if root is None or not os.access(root, os.W_OK):
        raise SystemExit("this needs a writable cgroup2")
    group = root / f"disagg-reboot-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        for folder, _, _ in os.walk(group, topdown=False):
            remove_group(Path(folder))


def remove_group(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            folder.rmdir()
            return
        except OSError:  # its processes are still ending
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def booted(bed: Bed) -> bool:
    said = bed.hosts[NAME].as_root("systemctl", "is-system-running", check=False).stdout.decode().strip()
    return said in ("running", "degraded")


def server(bed: Bed) -> int:
    """The server's process, by its id here."""
    return next(one.pid for one in bed.hosts[NAME].processes() if "disagg.servers" in " ".join(one.cmdline()))


def serving(fleet: Operator) -> Any:
    """Something that differs between two processes of the server; None unless it is healthy."""
    argv = fleet.argv("status", "--json")
    done = subprocess.run(
        argv, capture_output=True, text=True, env=fleet.environment, cwd=ROOT, timeout=PATIENCE_S, check=False
    )
    (row,) = json.loads(done.stdout)["hosts"]
    with suppress(psutil.Error, StopIteration):
        return psutil.Process(server(fleet.bed)).create_time() if row["state"] == "healthy" else None
    return None


def step(what: str, holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"{what}: not within {PATIENCE_S:.0f} s")
        time.sleep(0.2)
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


def timed(what: str, action: Callable[[], object]) -> None:
    began = time.monotonic()
    action()
    print(f"disagg {what}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
