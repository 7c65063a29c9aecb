"""Machines over SSH, against real sshds: what works, and every way it can fail."""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from disagg.config import Host
from disagg.errors import Cancelled, CommandFailed, FleetError, HostKeyRefused, HostUnreachable, LoginRefused
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import FanOutLimits, each, limited
from disagg.fleet.machine.interruption import interrupted_by
from disagg.fleet.machine.machine import MAX_OUTPUT, Invocation, Machine, Payload
from disagg.fleet.machine.ssh.connection import _tune
from disagg.fleet.machine.ssh.guard import Guard
from disagg.fleet.machine.ssh.machine import SSHMachine, _Execution, _stays
from disagg.fleet.machine.ssh.settings import SSHTimeouts
from disagg.fleet.machine.upload import put_tree
from tests.deadlines import LONG_S, ends_by_itself, wait_until
from tests.testbed.bed import Bed, BedHost
from tests.values import present

HOSTILE = [
    "two words",
    "'single' and \"double\"",
    "; touch /tmp/owned",
    "$(touch /tmp/owned) `id` ${HOME}",
    "line one\nline two\n",
    "-rf",
    "--",
    "",
    "*",
    "~root",
    "back\\slash\\n",
    "ünïcödé 日本語 🙂",
    "!history & | > <",
    "\ttab\x01control",
]
FAST = SSHTimeouts(connect=5, banner=5, auth=20, channel=20, dead_link=3)

Make = Callable[..., SSHMachine]


@pytest.fixture
def make(bed: Bed) -> Iterator[Make]:
    """Machines that are closed when the test ends."""
    made: list[SSHMachine] = []

    def make_machine(name: str = "dgx-spark-1", host: Host | None = None, **options: Any) -> SSHMachine:
        made.append(SSHMachine(host or bed.host(name), **options))
        return made[-1]

    yield make_machine
    for opened in made:
        opened.close()


@pytest.fixture
def spark(make: Make) -> SSHMachine:
    return make()


@pytest.fixture
def there(bed: Bed, spark: SSHMachine) -> Iterator[BedHost]:
    """The host behind `spark`, with a home that is emptied afterwards."""
    host = bed.hosts["dgx-spark-1"]
    yield host
    for path in host.home.iterdir():
        if path.name != ".ssh":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture(params=["dgx-spark-1", "mac-studio-1"])
def machine(make: Make, request: pytest.FixtureRequest) -> SSHMachine:
    """A Linux host, and one that looks like a Mac."""
    return make(request.param)


def known_hosts(bed: Bed) -> Path:
    return bed.home / ".ssh/known_hosts"


@pytest.fixture
def other_known_hosts(bed: Bed) -> Iterator[Path]:
    """known_hosts, put back as it was afterwards."""
    path = known_hosts(bed)
    before = path.read_text()
    yield path
    path.write_text(before)


def names(processes: Iterable[psutil.Process]) -> list[str]:
    """Of those that still run."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return found


def running(there: BedHost, word: str) -> bool:
    return any(word in line for line in there.command_lines())


# Running


def test_a_command_gives_its_code_and_both_streams(machine: Machine) -> None:
    result = machine.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (result.code, result.stdout, result.stderr, result.ok) == (7, "out\n", "err\n", False)


def test_a_connection_is_made_once(spark: SSHMachine) -> None:
    ports = {spark.run(["sh", "-c", 'echo "$SSH_CONNECTION"']).stdout for _ in range(3)}
    assert len(ports) == 1 and len(ports.pop().split()) == 4


def test_hostile_values_arrive_as_themselves(machine: Machine) -> None:
    for value in HOSTILE:
        arguments = machine.run(["printf", "%s|", value, "end"])
        assert arguments.stdout == f"{value}|end|"
        script = machine.run([value, "end"], script='printf "%s|" "$@" "$VALUE"', environment={"VALUE": value})
        assert script.stdout == f"{value}|end|{value}|"


def test_a_nul_character_is_refused_before_anything_runs(spark: SSHMachine) -> None:
    with pytest.raises(FleetError, match="NUL"):
        spark.run(["echo", "a\0b"])


def test_a_script_has_parameters_no_input_and_the_home_folder(machine: Machine) -> None:
    result = machine.run(["one", "two words"], script='echo "$#:$2"; cat; [ "$PWD" = "$HOME" ] && echo home')
    assert result.stdout == "2:two words\nhome\n"


def test_a_script_with_a_syntax_error_fails_with_the_shells_words(spark: SSHMachine) -> None:
    result = spark.run([], script="if true; then")
    assert result.code == 2 and "yntax error" in result.stderr


def test_the_environment_is_added_and_never_in_a_process_list(spark: SSHMachine, there: BedHost) -> None:
    seen: list[str] = []
    result = spark.run(
        ["sh", "-c", 'echo started; sleep 0.3; echo "$SECRET/$HOME"'],
        environment={"SECRET": "swordfish"},
        on_line=lambda line: seen.extend(there.command_lines()),
    )
    assert result.stdout == f"started\nswordfish/{there.remote_home}\n"
    assert seen and not any("swordfish" in line for line in seen)


def test_a_variable_with_an_impossible_name_is_refused(spark: SSHMachine) -> None:
    with pytest.raises(FleetError, match="not a valid name of an environment"):
        spark.run(["true"], environment={"A=$(id)": "x"})


def test_lines_are_reported_as_they_come(spark: SSHMachine, there: BedHost) -> None:
    reported: list[str] = []

    def on_line(line: str) -> None:
        reported.append(line)
        if line == "first":
            (there.home / "go-on").touch()

    until_reported = "until test -e go-on; do sleep 0.05; done"
    spark.run(["sh", "-c", f"echo first; echo also >&2; {until_reported}; printf 'a\\rb\\r\\nlast'"], on_line=on_line)
    assert sorted(reported) == ["a", "also", "b", "first", "last"]


def test_output_is_bounded_and_says_what_is_missing(spark: SSHMachine) -> None:
    result = spark.run(["sh", "-c", "echo begin; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end"])
    assert result.stdout.startswith("begin\nxxx") and result.stdout.endswith("xxx\nend\n")
    assert len(result.stdout) < 2 * MAX_OUTPUT + 100
    missing = 3000000 + len("begin\n\nend\n") - 2 * MAX_OUTPUT
    assert f"[... {missing} bytes left out ...]" in result.stdout


def test_what_a_login_shell_says_is_no_output(spark: SSHMachine, there: BedHost) -> None:
    (there.home / ".bashrc").write_text("echo Welcome to spark; echo 'disk almost full' >&2\n")
    result = spark.run(["echo", "hello"])
    assert (result.stdout, result.stderr) == ("hello\n", "")


def test_a_login_shell_that_runs_nothing_is_reported(spark: SSHMachine, there: BedHost) -> None:
    (there.home / ".bashrc").write_text("echo This account is closed; exit 3\n")
    with pytest.raises(HostUnreachable, match=r"exited with code 3 .* it printed: This account is closed"):
        spark.run(["true"])


def test_a_command_killed_by_a_signal_has_the_shells_code(spark: SSHMachine) -> None:
    assert spark.run(["sh", "-c", "kill -SEGV $$"]).code == 128 + signal.SIGSEGV


def test_a_command_that_is_not_there_is_code_127(machine: Machine) -> None:
    assert machine.run(["no-such-command"]).code == 127


def test_a_process_left_in_the_background_does_not_hold_the_command(spark: SSHMachine) -> None:
    with ends_by_itself():
        assert spark.run([], script=f"sleep {LONG_S} & echo done").stdout == "done\n"


def test_a_mac_has_no_setsid_and_a_short_path(make: Make, bed: Bed) -> None:
    bed.need_links()
    result = make("mac-studio-1").run(["sh", "-c", 'command -v setsid nproc; uname; echo "$PATH"; hostname'])
    assert result.stdout == "Darwin\n/usr/bin:/bin:/usr/sbin:/sbin\nmac-studio-1\n"


# Files


def test_hostile_paths_and_contents_round_trip(machine: Machine) -> None:
    for value in filter(None, HOSTILE):
        name, content = value.replace("/", "_"), value.encode()
        machine.write(f"~/{name}/{name}", content)
        assert machine.read(f"~/{name}/{name}") == content
        assert machine.read(f"{name}/{name}") == content
        put_tree(machine, {f"{name}/{name}": content}, f"tree/{name}")
        assert machine.read(f"tree/{name}/{name}/{name}") == content
        machine.run(["tree", name], script='rm -rf -- "$1" "./$2"')


def test_every_byte_survives(machine: Machine) -> None:
    content = bytes(range(256)) * 1000
    machine.write("bytes", content)
    assert machine.read("bytes") == content
    assert machine.read("bytes", limit=5) == content[-5:]
    machine.write("bytes", b"")
    assert machine.read("bytes") == b""
    machine.run([], script="rm bytes")  # other tests find the host as it was


def test_a_file_that_is_not_there_reads_as_none(machine: Machine) -> None:
    assert machine.read("~/nothing") is None
    assert machine.read("/no/such/folder/file") is None


def test_a_file_that_may_not_be_read_is_an_error(spark: SSHMachine) -> None:
    with pytest.raises(CommandFailed, match=r"dgx-spark-1: cannot read /etc/shadow: .*Permission denied"):
        spark.read("/etc/shadow")
    with pytest.raises(CommandFailed, match="Is a directory"):
        spark.read("/etc")


def test_a_written_file_has_its_mode_and_leaves_nothing_beside_it(spark: SSHMachine, there: BedHost) -> None:
    spark.write("conf/token", b"secret", mode=0o600)
    spark.write("conf/token", b"other", mode=0o600)
    spark.write("conf/tool", b"#!/bin/sh", mode=0o755)
    assert [(p.name, p.stat().st_mode & 0o777) for p in sorted((there.home / "conf").iterdir())] == [
        ("token", 0o600),
        ("tool", 0o755),
    ]
    assert (there.home / "conf/token").read_bytes() == b"other"


def test_a_secret_is_never_readable_by_others_while_it_is_written(spark: SSHMachine, there: BedHost, bed: Bed) -> None:
    bed.need_links()
    modes: set[int] = set()
    lines: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for path in there.home.glob(".token.part.*"):
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                modes.add(status.st_mode & 0o777)
            lines.update(there.command_lines())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with bed.limited("dgx-spark-1", 4):  # slow, so that there is something to see
            spark.write("token", b"swordfish" * 60_000, mode=0o600)
    finally:
        over.set()
        watcher.join()
    assert modes == {0o600}
    assert any("sh -c" in line for line in lines) and not any("swordfish" in line for line in lines)


def test_writing_over_a_folder_is_refused(spark: SSHMachine, there: BedHost) -> None:
    (there.home / "folder").mkdir()
    with pytest.raises(CommandFailed, match="Is a directory"):
        spark.write("folder", b"x")
    assert list((there.home / "folder").iterdir()) == []


def test_a_tree_arrives_whole_with_modes(machine: Machine, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o755)
    big = tmp_path / "big"
    big.write_bytes(os.urandom(3 << 20))
    sent = put_tree(machine, {"bin/run": script, "a/b/c.txt": b"deep", "big": big}, "deep/er/tree")
    assert sent > 3 << 20
    assert machine.run(["deep/er/tree/bin/run"]).stdout == "ran\n"
    assert machine.read("deep/er/tree/big", limit=4 << 20) == big.read_bytes()
    listed = machine.run([], script="cd deep/er; ls -A . tree; ls -l tree/a/b/c.txt | cut -c1-10").stdout
    assert listed.split() == [".:", "tree", "tree:", "a", "big", "bin", "-rw-r--r--"]
    machine.run(["rm", "-rf", "deep"])


def test_a_large_tree_and_a_file_that_is_not_there(spark: SSHMachine, there: BedHost, tmp_path: Path) -> None:
    large = os.urandom(20 << 20)
    put_tree(spark, {"large": large}, "tree")
    assert (there.home / "tree/large").read_bytes() == large
    with pytest.raises(FleetError, match=r"cannot read .*/missing: No such file"):
        put_tree(spark, {"missing": tmp_path / "missing"}, "tree")


def test_a_tree_replaces_the_one_that_is_there(spark: SSHMachine, there: BedHost) -> None:
    put_tree(spark, {"old": b"1"}, "tree")
    put_tree(spark, {"new": b"2"}, "tree")
    assert [path.name for path in (there.home / "tree").iterdir()] == ["new"]
    assert sorted(path.name for path in there.home.iterdir()) == [".ssh", "tree"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../escape", "a/../../b", "", "."])
def test_a_path_out_of_the_tree_is_refused(spark: SSHMachine, name: str) -> None:
    with pytest.raises(FleetError, match="not a relative path within a folder"):
        put_tree(spark, {name: b""}, "tree")


def test_a_full_disk_is_reported_and_leaves_nothing(spark: SSHMachine, there: BedHost, bed: Bed) -> None:
    bed.need_links()
    (there.home / "small").mkdir()
    there.as_root("mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "none", f"{there.remote_home}/small")
    try:
        noise = os.urandom(4 << 20)
        with pytest.raises(CommandFailed, match="No space left on device") as caught:
            put_tree(spark, {"a": b"x", "noise": noise}, "small/tree")
        assert caught.value.hint == "make room: disagg exec --host dgx-spark-1 -- df -h"
        with pytest.raises(CommandFailed, match="No space left on device"):
            spark.write("small/file", noise)
        assert spark.run(["ls", "-A", "small"]).stdout == ""
    finally:
        there.as_root("umount", f"{there.remote_home}/small")


def test_a_read_only_home_is_reported(spark: SSHMachine, there: BedHost, bed: Bed) -> None:
    bed.need_links()
    there.as_root("mount", "-o", "remount,bind,ro", there.remote_home)
    try:
        for action in (lambda: spark.write("conf/f", b"x"), lambda: put_tree(spark, {"a": b"x"}, "tree")):
            with pytest.raises(CommandFailed, match="Read-only file system") as caught:
                action()
            assert "mounted read-only" in caught.value.hint
    finally:
        there.as_root("mount", "-o", "remount,bind,rw", there.remote_home)


def test_a_folder_of_somebody_else_is_reported(spark: SSHMachine, bed: Bed) -> None:
    bed.need_links()
    with pytest.raises(CommandFailed, match="Permission denied"):
        put_tree(spark, {"a": b"x"}, "/etc/tree")


# What goes wrong while connecting


def test_an_unknown_host_key_is_refused_with_its_fingerprint(make: Make, bed: Bed, other_known_hosts: Path) -> None:
    other_known_hosts.write_text("")
    with pytest.raises(HostKeyRefused, match="is unknown: ssh-ed25519 SHA256:") as caught:
        make().run(["true"])
    assert caught.value.hint.startswith("disagg trust dgx-spark-1")
    assert other_known_hosts.read_text() == ""


def test_a_changed_host_key_is_refused_with_both_fingerprints(make: Make, bed: Bed, other_known_hosts: Path) -> None:
    lines = other_known_hosts.read_text().splitlines()
    names = [line.split()[0] for line in lines]
    keys = [line.split(maxsplit=1)[1] for line in lines]
    other_known_hosts.write_text("".join(f"{n} {k}\n" for n, k in zip(names, keys[1:] + keys[:1], strict=True)))
    with pytest.raises(
        HostKeyRefused, match=r"has changed from ssh-ed25519 SHA256:\S+ to ssh-ed25519 SHA256:"
    ) as caught:
        make().run(["true"])
    assert f"ssh-keygen -R '{names[0]}' -f '{other_known_hosts}'" in caught.value.hint


def test_hashed_known_hosts_are_understood(make: Make, other_known_hosts: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", other_known_hosts], check=True, capture_output=True)
    other_known_hosts.with_name("known_hosts.old").unlink()
    assert "169.254" not in other_known_hosts.read_text() and "127.0.0.1" not in other_known_hosts.read_text()
    assert make().run(["true"]).ok


def test_a_wrong_user_is_refused_with_the_command_that_repairs_it(make: Make, bed: Bed) -> None:
    host = replace(bed.host("dgx-spark-1"), user="nobody-here")
    with pytest.raises(LoginRefused, match=r"refuses the login of nobody-here: 1 key tried") as caught:
        make(host=host).run(["true"])
    assert "ssh-copy-id" in caught.value.hint and f"nobody-here@{host.address}" in caught.value.hint


def test_a_key_that_is_not_there_is_named(make: Make, bed: Bed) -> None:
    host = replace(bed.host("dgx-spark-1"), key="~/.ssh/missing")
    with pytest.raises(LoginRefused, match=r"there is no private key to try; .*/\.ssh/missing does not exist"):
        make(host=host).run(["true"])


def test_a_key_with_a_passphrase_names_ssh_add(make: Make, bed: Bed, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True)
    with pytest.raises(LoginRefused, match="has a passphrase: ssh-add"):
        make(host=replace(bed.host("dgx-spark-1"), key=str(locked))).run(["true"])


@pytest.fixture
def only_passwords(bed: Bed) -> Iterator[int]:
    """The port of an sshd that takes passwords and no keys, as a Mac's does before its disk is unlocked."""
    there = bed.hosts["dgx-spark-1"]
    port = 2222 if bed.real else there.port + 1
    lines = (there.folder / "sshd_config").read_text().replace("Authentication no", "Authentication yes")
    config = there.folder / "sshd_config.locked"
    config.write_text(lines.replace(f"Port {there.port}", f"Port {port}") + "PubkeyAuthentication no\n")
    sshd = present(shutil.which("sshd"))
    inside = ["nsenter", "-t", str(there.init), "-m", "-n", "-p"] if bed.real else []
    with subprocess.Popen([*inside, sshd, "-D", "-f", config], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: listens(bed.host("dgx-spark-1").address, port))
        yield port
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()


def listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_host_that_takes_only_passwords_is_called_locked(
    make: Make, bed: Bed, only_passwords: int, other_known_hosts: Path
) -> None:
    host = replace(bed.host("dgx-spark-1"), ssh_port=only_passwords)
    kind, key, *_ = (bed.hosts["dgx-spark-1"].folder / "host_key.pub").read_text().split()
    with other_known_hosts.open("a") as file:
        file.write(f"[{host.address}]:{only_passwords} {kind} {key}\n")
    with pytest.raises(LoginRefused, match="a Mac that restarted with FileVault is locked") as caught:
        make(host=host).run(["true"])
    assert caught.value.hint.startswith("unlock it with the password: ssh -p")


def test_a_refused_port_says_how_sshd_is_started(make: Make, bed: Bed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    host = replace(bed.host("dgx-spark-1"), ssh_port=port)
    with pytest.raises(HostUnreachable, match="nothing listens on") as caught:
        make(host=host).run(["true"])
    assert f"{host.address}:{port}" in caught.value.message
    assert "systemctl enable --now ssh" in caught.value.hint


def test_a_name_that_does_not_resolve_is_unreachable(make: Make, bed: Bed) -> None:
    with pytest.raises(HostUnreachable, match=r"the name no-such-host\.invalid cannot be resolved"):
        make(host=replace(bed.host("dgx-spark-1"), address="no-such-host.invalid")).run(["true"])


def test_a_frozen_sshd_is_unreachable_in_bounded_time(make: Make, bed: Bed, capfd: pytest.CaptureFixture[str]) -> None:
    frozen = bed.hosts["dgx-spark-1"].frozen()
    with ends_by_itself(), frozen, pytest.raises(HostUnreachable, match="sshd sends nothing"):
        make(timeouts=FAST).run(["true"])
    assert capfd.readouterr() == ("", ""), "paramiko's threads print tracebacks"


@pytest.mark.parametrize("silent", [True, False])
def test_a_host_without_a_link_is_unreachable_in_bounded_time(make: Make, bed: Bed, silent: bool) -> None:
    bed.need_links()
    cut = bed.cut("dgx-spark-1", silent=silent)
    with ends_by_itself(), cut, pytest.raises(HostUnreachable, match=r"169\.254\.150\.103:22"):
        make(timeouts=FAST).run(["true"])


# What goes wrong while running


def test_a_timeout_kills_the_whole_process_group(machine: SSHMachine, bed: Bed) -> None:
    there = bed.hosts[machine.name]
    message = r"did not end within 3 s and was killed; its last output:\nstarted"
    machine.run(["true"])  # the time to connect counts, too
    with ends_by_itself(), pytest.raises(FleetError, match=message):
        machine.run([], script="echo started; (sleep 4321; true) | sleep 4321", timeout=3)
    wait_until(lambda: not running(there, "sleep 4321"))


def test_a_group_that_ignores_sigterm_is_killed_all_the_same(spark: SSHMachine, there: BedHost) -> None:
    with pytest.raises(FleetError, match="was killed"):
        spark.run([], script="trap '' TERM; sleep 4322", timeout=0.3)
    wait_until(lambda: not running(there, "sleep 4322"))


def test_the_connection_serves_on_after_a_timeout(spark: SSHMachine) -> None:
    with pytest.raises(FleetError, match="was killed"):
        spark.run(["sleep", "60"], timeout=0.2)
    assert spark.run(["echo", "still here"], timeout=LONG_S).stdout == "still here\n"


@pytest.fixture
def make_guarded(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Machines whose guard ends a command soon after its client is gone, but often gets its heartbeat."""
    monkeypatch.setattr("disagg.fleet.machine.ssh.machine.HEARTBEAT_S", 0.25)
    return lambda: make(timeouts=FAST, guard_s=4)


def test_a_cut_link_ends_a_run_within_seconds_and_the_host_ends_it_too(make_guarded: Make, bed: Bed) -> None:
    bed.need_links()
    there = bed.hosts["dgx-spark-1"]
    before = set(there.processes())
    machine, idle = make_guarded(), make_guarded()
    ours, sshds = set[psutil.Process](), list[int]()

    def cut_when_it_runs() -> None:
        wait_until(lambda: running(there, "sleep 4323"))
        ours.update(set(there.processes()) - before)
        sshds.append(sum("sshd" in name for name in names(ours)))
        bed.cut_link("dgx-spark-1")

    cut = threading.Thread(target=cut_when_it_runs)
    machine.run(["true"])
    idle.run(["true"])
    cut.start()
    try:
        with ends_by_itself(60), pytest.raises(HostUnreachable, match="connection lost"):
            machine.run(["sleep", "4323"], timeout=60)
        wait_until(lambda: not running(there, "sleep 4323"))
        assert sshds[0] >= 4  # for each connection one of root and one of its user
        wait_until(lambda: not names(ours))  # nor the guards
    finally:
        cut.join()
        bed.restore_link("dgx-spark-1")
    assert machine.run(["echo", "back"]).stdout == "back\n"


def test_the_guard_is_notified_that_an_idle_client_runs(spark: SSHMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    reported: list[Guard] = []
    heartbeat = Guard.heartbeat

    def noted(guard: Guard) -> None:
        heartbeat(guard)
        reported.append(guard)

    monkeypatch.setattr("disagg.fleet.machine.ssh.machine.HEARTBEAT_S", 0.02)
    monkeypatch.setattr(Guard, "heartbeat", noted)
    spark.run(["true"])
    wait_until(lambda: len(reported) > 3)
    assert spark.run(["echo", "still here"]).stdout == "still here\n"
    spark.close()
    wait_until(lambda: not any(one.name.startswith("guard") for one in set(threading.enumerate()) - before))


def test_a_cut_link_ends_an_upload_and_leaves_no_half_tree(make_guarded: Make, bed: Bed, there: BedHost) -> None:
    bed.need_links()
    machine = make_guarded()
    noise = os.urandom(4 << 20)
    with bed.limited("dgx-spark-1", 8):

        def cut_midway() -> None:
            wait_until(lambda: any(there.home.glob(".tree.part.*")))
            bed.cut_link("dgx-spark-1")

        cut = threading.Thread(target=cut_midway)
        machine.run(["true"])
        cut.start()
        try:
            with ends_by_itself(), pytest.raises(HostUnreachable, match="connection lost"):
                put_tree(machine, {"a": b"first", "noise": noise}, "tree")
            wait_until(lambda: [path.name for path in there.home.iterdir()] == [".ssh"])
        finally:
            cut.join()
            bed.restore_link("dgx-spark-1")
    put_tree(machine, {"a": b"first"}, "tree")
    assert machine.read("tree/a") == b"first"


def test_a_large_file_goes_on_after_a_cut_link_where_it_stopped(
    bed: Bed, make: Make, there: BedHost, tmp_path: Path
) -> None:
    bed.need_links()
    machine, big = make(timeouts=FAST), tmp_path / "big"
    big.write_bytes(os.urandom(6 << 20))
    machine.run(["true"])
    with bed.limited("dgx-spark-1", 16):

        def cut_midway(moved: int, total: int, sent: int) -> None:
            if moved > 2 << 20 and not cut:
                cut.append(moved)
                bed.cut_link("dgx-spark-1")

        cut: list[int] = []
        try:
            with ends_by_itself(), pytest.raises(HostUnreachable, match="connection lost"):
                put_tree(machine, {"big": big}, "tree", parts="parts", on_moved=cut_midway)
        finally:
            bed.restore_link("dgx-spark-1")
    kept = next((there.home / "parts").iterdir())
    there.as_root("pkill", "-TERM", "-x", "cat", check=False)  # as the guard does within 30 s
    wait_until(lambda: there.as_root("pgrep", "-x", "cat", check=False).returncode == 1)
    assert 0 < kept.stat().st_size < big.stat().st_size
    before = kept.stat().st_size
    assert put_tree(machine, {"big": big}, "tree", parts="parts") < big.stat().st_size - before + (1 << 20)
    assert machine.read("tree/big", limit=8 << 20) == big.read_bytes()


def test_an_interrupted_upload_leaves_no_half_tree(spark: SSHMachine, there: BedHost, bed: Bed) -> None:
    bed.need_links()
    put_tree(spark, {"version": b"old"}, "tree")
    stop = threading.Event()
    with bed.limited("dgx-spark-1", 8), interrupted_by(stop), pytest.raises(Cancelled):
        put_tree(
            spark,
            {"version": b"new", "noise": os.urandom(4 << 20)},
            "tree",
            on_moved=lambda moved, total, sent: stop.set(),
        )
    assert sorted(path.name for path in there.home.iterdir()) == [".ssh", "tree"]
    assert spark.read("tree/version") == b"old"


def test_what_waits_to_be_sent_is_limited_and_what_is_under_way_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        _tune(sock, 20.0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 1 << 17
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= before


def test_an_upload_whose_command_has_ended_reads_no_closed_file() -> None:
    class Taking:
        def sendall(self, data: bytes) -> None: ...

        def shutdown_write(self) -> None: ...

    payload = io.BytesIO(b"rest")
    payload.close()
    invocation = Invocation(b"", 1.0, Payload(payload))
    _Execution(cast(SSHMachine, None), Taking(), invocation, 0.0)._feed()


def test_a_connection_that_has_stated_why_it_ends_is_not_waited_for() -> None:
    transport: Any = SimpleNamespace(saved_exception=EOFError(), is_active=lambda: True)
    assert not _stays(transport)


def test_closing_from_another_thread_ends_what_runs(spark: SSHMachine, there: BedHost) -> None:
    spark.run(["true"])

    def close_midway() -> None:
        wait_until(lambda: running(there, "sleep 4324"))
        spark.close()

    closer = threading.Thread(target=close_midway)
    closer.start()
    with pytest.raises(HostUnreachable, match="connection lost"):
        spark.run(
            ["sleep", "4324"],
        )
    closer.join()
    wait_until(lambda: not running(there, "sleep 4324"))


def test_a_client_that_is_killed_leaves_nothing_running(bed: Bed, there: BedHost, tmp_path: Path) -> None:
    hosts_toml = bed.write_hosts_toml(tmp_path / "hosts.toml")
    code = "from disagg.config import load; from disagg.fleet.machine.connect import machine_for; "
    code += f"host = load(__import__('pathlib').Path({str(hosts_toml)!r})).hosts['dgx-spark-1']; "
    code += "machine_for(host).run(['sleep', '4325'])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[4]) as client:
        wait_until(lambda: running(there, "sleep 4325"))
        client.kill()
    wait_until(lambda: not running(there, "sleep 4325"))


# Many at once


def test_each_keeps_the_order_and_hides_no_result_behind_an_error(bed: Bed) -> None:
    hosts = [bed.host(name) for name in bed.hosts]
    hosts[1] = replace(hosts[1], user="nobody-here")

    def action(host: Host) -> str:
        machine = machine_for(host)
        try:
            return machine.run(["echo", host.name]).stdout
        finally:
            machine.close()

    outcomes = each(hosts, action)
    assert [outcome.host.name for outcome in outcomes] == list(bed.hosts)
    assert [outcome.ok for outcome in outcomes] == [True, False, True, True]
    assert isinstance(outcomes[1].error, LoginRefused)
    assert outcomes[2].value == f"{hosts[2].name}\n"


def test_ctrl_c_ends_every_host_within_seconds(bed: Bed) -> None:
    hosts = [bed.host(name) for name in bed.hosts]
    errors: list[BaseException] = []

    def action(host: Host) -> None:
        machine = machine_for(host)
        try:
            machine.run(["sleep", "4326"])
        except Cancelled as error:
            errors.append(error)
            raise
        finally:
            machine.close()

    def interrupt() -> None:
        wait_until(lambda: all(running(host, "sleep 4326") for host in bed.hosts.values()))
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with ends_by_itself():
        with pytest.raises(KeyboardInterrupt):
            each(hosts, action)
        interrupter.join()
    assert len(errors) == 4
    wait_until(lambda: not any(running(host, "sleep 4326") for host in bed.hosts.values()))


def test_a_fault_of_the_action_is_raised_when_the_others_have_ended(bed: Bed) -> None:
    done: list[str] = []

    def action(host: Host) -> None:
        if host.name == "dgx-spark-1":
            raise ZeroDivisionError
        done.append(host.name)

    with limited(FanOutLimits(parallel=1)), pytest.raises(ZeroDivisionError):
        each([bed.host(name) for name in bed.hosts], action)
    assert len(done) == 3
