"""Four machines to reach over SSH, at the addresses of hosts.toml, inside this one.

Each host is a set of namespaces (network, mount, hostname, process ids) with an sshd on port 22, a host key, an
account and a home of its own (/tmp is this machine's); two look like macOS as far as a shell can see. A bridge in one
more network namespace, the hub, joins them. Nothing of it is visible outside: two beds at once never meet, and there
is nothing to clean up when the process that made one is killed, for every host ends with it.

A test is inside while it runs (`Bed.entered`): its thread, and the threads and processes it starts, are moved into the
hub, from where the hosts are reached at their addresses. Sockets stay where they were made.

Without root, or without leave to make namespaces, the hosts are plain sshds on free ports of 127.0.0.1, for the
account that runs the tests; what needs a link to cut or an account of its own is then skipped, saying so.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from disagg.config import Fleet, Host, load
from tests.deadlines import LONG_S
from tests.programs import PATH, need
from tests.testbed import network

HOSTS_TOML = Path(__file__).parents[2] / "hosts.toml"
_MAC_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_ACCOUNT = 2000


@dataclass
class BedHost:
    """One machine of the bed. `home`: its account's home as seen from the tests; `remote_home`: as seen on it."""

    name: str
    address: str
    port: int
    user: str
    mac: bool
    folder: Path
    home: Path
    remote_home: str
    process: subprocess.Popen[bytes]
    link: str = ""

    @property
    def init(self) -> int:
        """Its first process, by its id here: `unshare` itself stays outside of the namespaces it makes for it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def processes(self) -> list[psutil.Process]:
        """What runs on this host, as seen from here. On loopback: all that runs here."""
        if not self.link:
            return list(psutil.process_iter())
        namespace, found = network.namespace(self.init, "pid"), []
        for one in Path("/proc").iterdir():  # psutil would read files of every process of this machine
            if one.name.isdigit() and network.namespace(one.name, "pid") == namespace:
                with suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(one.name)))
        return found

    def command_lines(self) -> list[str]:
        """The command line of every process on this host."""
        lines = []
        for process in self.processes():
            with suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        return lines

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within, its sshd takes connections and says nothing."""
        listener = self.process.pid if not self.link else self.init
        family = [psutil.Process(listener), *psutil.Process(listener).children(recursive=True)]
        daemons = [process for process in family if process.name() == "sshd"]
        for daemon in daemons:
            daemon.suspend()
        try:
            yield
        finally:
            for daemon in daemons:
                with suppress(psutil.NoSuchProcess):
                    daemon.resume()

    def as_root(self, *argv: object, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run a command on this host as its root, without SSH."""
        inside = ["nsenter", "-t", str(self.init), "-m", "-n", "-u", "-p"]
        return subprocess.run([*inside, *map(str, argv)], check=check, capture_output=True, timeout=LONG_S)


@dataclass
class Bed:
    """The fleet: `hosts` by name, and the client's `home`, whose .ssh knows them all. source: the hosts.toml that it
    looks like."""

    folder: Path
    hosts: Mapping[str, BedHost]
    home: Path
    hub: subprocess.Popen[bytes] | None = None
    real: bool = True
    source: Path = HOSTS_TOML
    _fleet: Fleet = field(init=False)
    _ssh_files: Mapping[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._fleet = load(self.source)
        self._ssh_files = {name: (self.home / ".ssh" / name).read_bytes() for name in ("config", "known_hosts")}
        if not self.real:
            there = {
                name: replace(host, address="127.0.0.1", ssh_port=self.hosts[name].port)
                for name, host in self._fleet.hosts.items()
            }
            self._fleet = replace(self._fleet, hosts=there)

    @property
    def fleet(self) -> Fleet:
        """The hosts.toml that the bed looks like, by default the repository's."""
        return self._fleet

    def host(self, name: str) -> Host:
        return self._fleet.hosts[name]

    def need_bare_hosts(self) -> None:
        """Remove what earlier tests of this process have deployed."""
        for host in self.hosts.values():
            shutil.rmtree(host.home / ".disagg", ignore_errors=True)

    def empty(self) -> None:
        """Take back what earlier tests have left: files in the homes, processes on the hosts, known host keys."""
        for host in self.hosts.values():
            if self.real:
                _kill_all(host)
            _remove_all_but_keys(host.home)
        _remove_all_but_keys(self.home)
        for name, content in self._ssh_files.items():
            (self.home / ".ssh" / name).write_bytes(content)

    def need_links(self) -> None:
        """Skip a test that cannot run on loopback."""
        if not self.real:
            pytest.skip("needs network namespaces: run as root")

    def write_hosts_toml(self, path: Path) -> Path:
        """A hosts.toml of this bed that serves the demo models on CPUs, each server a plain process."""
        text = self.source.read_text(encoding="utf-8")
        for name, folder in (("qwen3-coder:30b", "qwen3-moe-tiny"), ("gpt-oss:120b", "gpt-oss-tiny")):
            header = f'[models."{name}".sources]\n'
            before, after = text.split(header)
            rest = after.split("\n\n", 1)[1]
            sources = f'transformers = "package:demo/models/{folder}"\nmlx = "package:demo/models/{folder}"'
            text = f"{before}{header}{sources}\n\n{rest}"
        text = re.sub(r'service = "(systemd|launchd)"', 'service = "process"', text)
        text = re.sub(r'dtype = "bfloat16"', 'dtype = "float32"', text)
        text = re.sub(r'device = "(cuda|gpu)"', 'device = "cpu"\nthreads = 1', text)
        text = text.replace('name = "vllm"', 'name = "transformers"')
        text = re.sub(r"^(# )?(kv_cache_memory_bytes|enforce_eager) = .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"max_kv_bytes = .*", "max_kv_bytes = 1_073_741_824", text)
        text = text.replace("context = 32768", "context = 8192")
        if not self.real:
            for host in self.hosts.values():
                text = text.replace(f'address = "{host.address}"', f'address = "127.0.0.1"\nssh_port = {host.port}')
            text = re.sub(r"^(port|kv_port) = .*", lambda key: f"{key[1]} = {_free_port()}", text, flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")
        return path

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, this thread and what it starts are in the hub's network, with the client's HOME."""
        home = os.environ.get("HOME")
        os.environ["HOME"] = str(self.home)
        try:
            with network.inside(self.hub):
                yield
        finally:
            if home is None:
                del os.environ["HOME"]
            else:
                os.environ["HOME"] = home

    def listener(self) -> socket.socket:
        """A socket that the hosts reach. It stays in the hub's network, wherever the thread is that answers."""
        with network.inside(self.hub):
            return socket.create_server((network.HUB if self.real else "127.0.0.1", 0))

    @contextmanager
    def cut(self, name: str, *, silent: bool = False) -> Iterator[None]:
        """Within, nothing passes between the host and the others: the cable is out. silent: see cut_link."""
        self.cut_link(name, silent=silent)
        try:
            yield
        finally:
            self.restore_link(name)

    def cut_link(self, name: str, *, silent: bool = False) -> None:
        """Pull the cable. silent: a new connection from the hub is never answered, as through a router. Otherwise it
        fails with "No route to host", at once instead of after the seconds in which the kernel looks for the host."""
        self._in_hub("ip", "link", "set", self.hosts[name].link, "down")
        if not silent:
            self._in_hub("ip", "route", "replace", "unreachable", self.hosts[name].address)

    def restore_link(self, name: str) -> None:
        """Put the cable back, and wait until the host answers."""
        self._in_hub("ip", "route", "flush", "exact", f"{self.hosts[name].address}/32")
        self._in_hub("ip", "link", "set", self.hosts[name].link, "up")
        with network.inside(self.hub):
            await_sshd(self.hosts[name])

    @contextmanager
    def limited(self, name: str, megabit: float) -> Iterator[None]:
        """Within, the host's link carries so much each way, as a slow network does."""
        host = self.hosts[name]
        shape = ["root", "tbf", "rate", f"{megabit}mbit", "burst", "64kb", "latency", "50ms"]
        self._in_hub("tc", "qdisc", "replace", "dev", host.link, *shape)
        self._on_host(name, "tc", "qdisc", "replace", "dev", "eth0", *shape)
        try:
            yield
        finally:
            self._in_hub("tc", "qdisc", "del", "dev", host.link, "root")
            self._on_host(name, "tc", "qdisc", "del", "dev", "eth0", "root")

    def _in_hub(self, *argv: str) -> None:
        assert self.hub is not None, "a loopback bed has no links"
        network.in_network(self.hub, *argv)

    def _on_host(self, name: str, *argv: str) -> None:
        network.in_network(self.hosts[name].process, *argv)


@contextmanager
def running(folder: Path, source: Path = HOSTS_TOML) -> Iterator[Bed]:
    """A bed of the hosts of this hosts.toml in this folder, gone afterwards. Skips where a program is missing."""
    real = network.may_make_namespaces()
    need("sshd", "ssh-keygen", *(("ip", "tc", "nsenter", "pkill") if real else ()))
    os.environ["PATH"] = PATH
    folder.chmod(0o755)
    sshd = str(shutil.which("sshd"))
    home = make_client(folder)
    fleet = load(source)
    with ExitStack() as stack:
        hub = stack.enter_context(network.hub()) if real else None
        make = namespace_host if real else _loopback_host
        hosts = {host.name: stack.enter_context(make(folder, home, host, sshd, hub)) for host in fleet.hosts.values()}
        with network.inside(hub):
            for host in hosts.values():
                await_sshd(host)
        make_known(home, hosts)
        yield Bed(folder, hosts, home, hub, real, source)


@contextmanager
def namespace_host(
    folder: Path,
    home: Path,
    host: Host,
    sshd: str,
    hub: subprocess.Popen[bytes] | None,
    *,
    within: Sequence[str] = (),
    boots: bool = False,
    sudo: bool = False,
) -> Iterator[BedHost]:
    """boots: systemd is its first process. within: a command that runs the machine, as in a control group. sudo: its
    account may become root without a password, and root may make accounts."""
    assert hub is not None
    place = folder / host.name
    mac = host.service == "launchd"
    user = "studio" if mac else "spark"
    remote_home = f"/home/{user}"
    if not place.exists():  # else it is switched on again
        _account(place, user, remote_home)
        _authorise(place / "home", home, owner=_ACCOUNT)
        _sshd_config(place, 22, "0.0.0.0", [f'SetEnv PATH="{_MAC_PATH}"'] if mac else [])
    spec = {"name": host.name, "folder": str(place), "home": remote_home, "mac": mac, "sshd": sshd, "boots": boots}
    spec["sudo"] = sudo
    spec["pythons"] = sorted({os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix)})
    (place / "spec.json").write_text(json.dumps(spec))
    flags = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    script = str(Path(__file__).with_name("host.py"))
    argv = [
        "unshare",
        *flags,
        *(["--cgroup"] if boots else []),
        sys.executable,
        "-IS",
        script,
        str(place / "spec.json"),
    ]
    with network.child([*within, *argv]) as process:
        link = f"to-{len(host.name)}-{host.address.rpartition('.')[2]}"
        network.wire(hub, process, link, host.address)
        yield BedHost(host.name, host.address, 22, user, mac, place, place / "home", remote_home, process, link)


@contextmanager
def _loopback_host(
    folder: Path, home: Path, host: Host, sshd: str, hub: subprocess.Popen[bytes] | None
) -> Iterator[BedHost]:
    place = folder / host.name
    port = _free_port()
    _authorise(place / "home", home, owner=os.getuid())
    keys = place / "home/.ssh/authorized_keys"
    _sshd_config(place, port, "127.0.0.1", [f"AuthorizedKeysFile {keys}", f'SetEnv HOME="{place / "home"}"'])
    if os.geteuid() == 0:  # root who may not make namespaces, as in most containers
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    argv = [sshd, "-D", "-f", str(place / "sshd_config"), "-E", str(place / "sshd.log")]
    with network.child(argv) as process:
        local = place / "home"
        yield BedHost(host.name, host.address, port, getpass.getuser(), False, place, local, str(local), process)


def _kill_all(host: BedHost) -> None:
    """Kill what the host's account runs, and wait for its end."""
    deadline = time.monotonic() + LONG_S
    while host.as_root("pkill", "-KILL", "-u", _ACCOUNT, check=False).returncode == 0:
        assert time.monotonic() < deadline, f"{host.name} of the bed runs what cannot be killed"
        time.sleep(0.01)


def _remove_all_but_keys(home: Path) -> None:
    for path in home.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name != ".ssh":
                shutil.rmtree(path)
        else:
            path.unlink()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _account(place: Path, user: str, home: str) -> None:
    """What the host's /etc says about its accounts: root and one user, who has no password."""
    (place / "home").mkdir(parents=True)
    sshd_user = "sshd:x:74:65534::/run/sshd:/usr/sbin/nologin\n"
    bus = "messagebus:x:75:75::/:/usr/sbin/nologin\n"  # for systemd, if the host boots
    (place / "passwd").write_text(
        f"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n{sshd_user}{bus}"
        f"{user}:x:{_ACCOUNT}:{_ACCOUNT}::{home}:/bin/bash\n"
    )
    (place / "group").write_text(f"root:x:0:\nnogroup:x:65534:\nmessagebus:x:75:\n{user}:x:{_ACCOUNT}:\n")
    (place / "shadow").write_text(f"root:*:20000::::::\n{user}:*:20000::::::\n")
    (place / "shadow").chmod(0o640)


def _authorise(home: Path, client: Path, owner: int) -> None:
    ssh = home / ".ssh"
    ssh.mkdir(parents=True, mode=0o700)
    shutil.copy(client / ".ssh/id_ed25519.pub", ssh / "authorized_keys")
    for path in (home, ssh, ssh / "authorized_keys"):
        os.chown(path, owner, owner if owner == _ACCOUNT else os.getgid())


def _sshd_config(place: Path, port: int, address: str, more: list[str]) -> None:
    _keygen(place / "host_key", place.name)
    lines = [
        f"Port {port}",
        f"ListenAddress {address}",
        f"HostKey {place / 'host_key'}",
        "PidFile none",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "StrictModes no",  # the folders above may be anyone's
        "MaxStartups 100",
        "UseDNS no",
        "PrintMotd no",
        *more,
    ]
    (place / "sshd_config").write_text("\n".join(lines) + "\n")


def make_client(folder: Path) -> Path:
    """The home of whoever runs disagg."""
    home = folder / "client"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    _keygen(home / ".ssh/id_ed25519", "client")
    return home


def make_known(home: Path, hosts: Mapping[str, BedHost]) -> None:
    known, config = [], []
    for host in hosts.values():
        kind, key, *_ = (host.folder / "host_key.pub").read_text().split()
        known.append(f"{host.address if host.port == 22 else f'[127.0.0.1]:{host.port}'} {kind} {key}\n")
        if host.port == 22:
            config.append(f"Host {host.address}\n    User {host.user}\n")
    (home / ".ssh/known_hosts").write_text("".join(known))
    (home / ".ssh/config").write_text("".join(config))


def _keygen(path: Path, comment: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def await_sshd(host: BedHost) -> None:
    address = host.address if host.port == 22 else "127.0.0.1"
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            with socket.create_connection((address, host.port), timeout=1) as probe:
                assert probe.recv(4) == b"SSH-"
                return
        except OSError:
            if host.process.poll() is not None or time.monotonic() > deadline:
                host.process.kill()
                said = host.process.communicate()[1].decode(errors="replace")
                log = host.folder / "sshd.log"
                pytest.fail(f"{host.name} of the bed did not start: {said}{log.read_text() if log.exists() else ''}")
            time.sleep(0.01)
