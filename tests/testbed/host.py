"""The first process of a test host: arranges the machine it is to be, then runs its sshd, or becomes systemd.

    unshare --net --mount --uts --pid --fork --kill-child --mount-proc python host.py SPEC.json

It runs in namespaces of its own, so that all it mounts is seen by this host alone and all it starts ends with it. It
ends when its standard input does: with whoever made the bed, however that ended.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MAC_LACKS = (
    "setsid", "free", "nproc", "lscpu", "systemctl", "loginctl", "timeout", "ip", "ss", "flock", "pidof", "nvidia-smi",
)  # fmt: skip
MAC_TOOLS = {
    "uname": """case "$*" in
-s | "") echo Darwin ;; -m) echo arm64 ;; -r) echo 25.1.0 ;; -n) hostname ;;
"-s -m" | "-sm") echo Darwin arm64 ;; *) echo "Darwin $(hostname) 25.1.0 Darwin Kernel Version 25.1.0 arm64" ;; esac""",
    "sw_vers": """case "$1" in
-productVersion | --productVersion) echo 26.1 ;;
*) printf 'ProductName:\\tmacOS\\nProductVersion:\\t26.1\\nBuildVersion:\\t25B78\\n' ;; esac""",
}
MAC_SYSCTL = """[ "$1" = -n ] && bare=1 && shift
for key; do
  case $key in
    hw.memsize) value=549755813888 ;;
    machdep.cpu.brand_string) value="Apple M3 Ultra" ;;
    hw.ncpu | hw.logicalcpu | hw.physicalcpu) value=32 ;;
    iogpu.wired_limit_mb) value=0 ;;
    kern.osproductversion) value=26.1 ;;
    *) echo "sysctl: unknown oid '$key'" >&2; exit 1 ;;
  esac
  if [ -n "$bare" ]; then echo "$value"; else echo "$key: $value"; fi
done"""


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(spec["folder"])
    _run("hostname", spec["name"])
    _run("ip", "link", "set", "lo", "up")
    _run("mount", "-t", "sysfs", "none", "/sys")  # shows this host's interfaces instead of the whole machine's
    if spec["boots"]:
        _mount_as_container(folder)
    elif spec["sudo"]:
        _overlay(Path("/etc"), folder / "own-etc", {}, ())
    _mount_private(spec, folder)  # from here on a Mac has no `ip`
    if spec["boots"]:
        _boot(spec, folder)
    sshd = subprocess.Popen(
        [spec["sshd"], "-D", "-f", folder / "sshd_config", "-E", folder / "sshd.log"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    threading.Thread(target=_await_end_of_input, daemon=True).start()
    while True:  # the first process inherits every orphan
        pid, _ = os.wait()
        if pid == sshd.pid:
            sys.exit("sshd ended")


MASKED = (  # what would touch the machine that this host is a part of
    "systemd-tmpfiles-setup.service", "systemd-tmpfiles-setup-dev.service", "systemd-tmpfiles-clean.timer",
    "systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket", "systemd-sysctl.service", "systemd-modules-load.service",
    "systemd-update-utmp.service", "systemd-random-seed.service", "systemd-timesyncd.service",
    "systemd-remount-fs.service", "systemd-journal-flush.service", "systemd-sysusers.service",
    "keyboard-setup.service", "dev-hugepages.mount",
    "dev-mqueue.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-fs-fuse-connections.mount",
    "proc-sys-fs-binfmt_misc.automount",
)  # fmt: skip
DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
BED_TARGET = """[Unit]
Requires=basic.target
After=basic.target
Wants=dbus.service systemd-logind.service systemd-user-sessions.service bed-sshd.service
AllowIsolate=yes
"""


def _mount_as_container(folder: Path) -> None:
    """Files and control groups of its own, and settings of the kernel that it cannot change."""
    for name in ("etc", "var"):
        _overlay(Path("/", name), folder / f"boot-{name}", {}, ())
    _mount_devices(folder / "boot-dev")
    (folder / "linger").mkdir(exist_ok=True)  # stays when the host is switched off
    linger = Path("/var/lib/systemd/linger")
    linger.mkdir(parents=True, exist_ok=True)
    _bind(folder / "linger", linger)
    _run("mount", "-t", "cgroup2", "none", "/sys/fs/cgroup")
    _bind(Path("/proc/sys"), Path("/proc/sys"))
    _run("mount", "-o", "remount,bind,ro", "/proc/sys")


def _mount_devices(place: Path) -> None:
    """A /dev of its own: systemd makes links there."""
    place.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "none", place)
    for name, minor in DEVICES.items():
        os.mknod(place / name, 0o020666, os.makedev(1, minor))
        (place / name).chmod(0o666)
    for name in ("pts", "shm"):
        (place / name).mkdir()
    _bind(Path("/dev/pts"), place / "pts")
    (place / "ptmx").symlink_to("pts/ptmx")
    (place / "fd").symlink_to("/proc/self/fd")
    _run("mount", "--move", place, "/dev")


def _boot(spec: dict[str, Any], folder: Path) -> None:
    """systemd becomes the first process. It starts D-Bus, logind and sshd."""
    Path("/etc/hostname").write_text(f"{spec['name']}\n")
    units = Path("/run/systemd/system")
    units.mkdir(parents=True)
    for unit in MASKED:
        (units / unit).symlink_to("/dev/null")
    (units / "bed.target").write_text(BED_TARGET)
    sshd = f"{spec['sshd']} -D -f {folder / 'sshd_config'} -E {folder / 'sshd.log'}"
    (units / "bed-sshd.service").write_text(f"[Service]\nExecStart={sshd}\nKillMode=process\n")
    systemd = "/lib/systemd/systemd"
    os.execve(systemd, [systemd, "--system", "--unit=bed.target"], {"container": "bed", "PATH": os.environ["PATH"]})


def _mount_private(spec: dict[str, Any], folder: Path) -> None:
    for name in ("passwd", "group", "shadow"):
        if spec["sudo"]:  # useradd replaces these files, which it cannot with a mount
            shutil.copy(folder / name, Path("/etc") / name)
        else:
            _bind(folder / name, Path("/etc") / name)
    _open_to_all([Path(path) for path in spec["pythons"]], folder)
    _run("mount", "-t", "tmpfs", "none", "/home")
    home = Path(spec["home"])
    home.mkdir(parents=True)
    _bind(folder / "home", home)
    _run("mount", "-t", "tmpfs", "none", "/run")
    Path("/run/sshd").mkdir(mode=0o755)
    if spec["sudo"]:
        Path("/etc/sudoers.d/bed").write_text(f"{home.name} ALL=(ALL) NOPASSWD: ALL\n")
    if spec["mac"]:
        _overlay(Path("/usr/bin"), folder / "mac-bin", MAC_TOOLS, MAC_LACKS)
        _overlay(Path("/usr/sbin"), folder / "mac-sbin", {"sysctl": MAC_SYSCTL}, MAC_LACKS)


def _open_to_all(paths: list[Path], place: Path) -> None:
    """Let the host's account reach folders of this machine whose parents it may not enter."""
    closed = {
        path: [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001] for path in paths
    }
    hidden = [path for path in paths if closed[path]]
    for number, path in enumerate(hidden):
        (place / f"python-{number}").mkdir(exist_ok=True)
        _bind(path, place / f"python-{number}")
    for parent in {closed[path][0] for path in hidden}:
        _run("mount", "-t", "tmpfs", "-o", "mode=755", "none", parent)
    for number, path in enumerate(hidden):
        path.mkdir(parents=True)
        _bind(place / f"python-{number}", path)


def _overlay(place: Path, layer: Path, tools: dict[str, Any], hidden: tuple[str, ...]) -> None:
    """The folder with some programs replaced and some gone, for this host alone."""
    layer.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "none", layer)
    for part in ("upper", "work"):
        (layer / part).mkdir()
    for name, script in tools.items():
        tool = layer / "upper" / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    for name in hidden:
        if (place / name).exists():
            os.mknod(layer / "upper" / name, 0o600 | 0o020000, 0)  # how overlayfs writes "deleted"
    options = f"lowerdir={place},upperdir={layer}/upper,workdir={layer}/work"
    _run("mount", "-t", "overlay", "overlay", "-o", options, place)


def _bind(source: Path, target: Path) -> None:
    _run("mount", "--bind", source, target)


def _run(*argv: object) -> None:
    subprocess.run([str(word) for word in argv], check=True, stdin=subprocess.DEVNULL)


def _await_end_of_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


main()
