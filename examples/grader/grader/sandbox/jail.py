"""Run a command with nothing but its own files: `python jail.py SPEC.json ARGUMENT...`. Standard library only.

The process gets user, mount, process, network, IPC and host-name namespaces of its own. Its file system has the
system's programs and libraries, the Python packages that SPEC names (all read-only), the shared folder of the kernel's
sockets, and an empty home in memory. It has no network, not even loopback, and no capabilities.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn, TypedDict

CLONE_ALL = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""User, mount, process, network, IPC and host-name namespaces."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 2, 4, 4096, 16384, 1 << 18, 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, LAST_CAPABILITY = 1, 24, 38, 63
SYS_MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD, MOUNT_ATTR_RDONLY = 442, 0x8000, -100, 1
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DEVICES = ("null", "zero", "full", "random", "urandom")
ALLOW = (
    "sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; or a container's seccomp profile"
)
HOME = "/home/student"
READY = "ready"
"""A file that the kernel makes in the shared folder before any student code runs."""
START_S, WATCH_S = 0.01, 0.2
"""Between two looks: until the kernel is ready, and then."""
OUT_OF_BOUNDS = 250
"""Exit status if the processes together use too much."""

libc = ctypes.CDLL(None, use_errno=True)


class Spec(TypedDict):
    """What the command may use, in bytes and CPU seconds.

    root: an empty folder. shared: one that is writable until the kernel is ready. hidden: folders that look empty, also
    if they lie in one of `read_only`. data: a folder that appears in the home. memory_bytes: of one process by its
    address space, and of all together by what they really use.
    """

    root: str
    shared: str
    read_only: list[str]
    hidden: list[str]
    data: str | None
    memory_bytes: int
    file_bytes: int
    home_bytes: int
    cpu_seconds: int
    processes: int
    environment: dict[str, str]


def main() -> NoReturn:
    """An error is one line on stderr."""
    try:
        start(json.loads(Path(sys.argv[1]).read_text()))
    except OSError as error:
        sys.exit(f"jail: {error.strerror or error}")


def start(spec: Spec) -> NoReturn:
    enter_namespaces()
    end_with_parent()
    child = os.fork()
    if child == 0:
        end_with_parent()
        build_root(spec)
        limit(spec)
        drop_capabilities()
        os.execve(sys.argv[2], sys.argv[2:], spec["environment"])
    # The child is process 1 of its namespace: nothing in it outlives it, nor it this process, nor this one the grader.
    # An interrupt is for the kernel alone, which is in the same process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(watch(child, spec))


def watch(child: int, spec: Spec) -> int:
    """The child's exit status. Student code begins when the shared folder is read-only; it never runs unwatched.

    The child has given this process, too, the root of its name space: /proc is that of the jail.
    """
    shared, ready = Path(spec["shared"]), False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) & 0xFF
        if not ready and (shared / READY).exists():
            ready = closed(shared)
        if ready and over(spec):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return OUT_OF_BOUNDS
        time.sleep(WATCH_S if ready else START_S)


def closed(shared: Path) -> bool:
    """Make the shared folder read-only. False while a file in it is open for writing, as READY is for a moment: the
    kernel waits until it cannot write there, and fails the notebook if that takes too long."""
    try:
        read_only(shared)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def over(spec: Spec) -> bool:
    """Do the jail's processes together use more than they may? Memory that several share is counted once."""
    processes = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return len(processes) > spec["processes"] or sum(map(used, processes)) > spec["memory_bytes"]


def used(process: Path) -> int:
    """Bytes; 0 if it has ended."""
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def enter_namespaces() -> None:
    uid, gid = os.getuid(), os.getgid()
    try:
        check(libc.unshare(CLONE_ALL), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")
    except OSError as error:
        raise OSError(error.errno, f"this machine allows no user namespaces ({error.strerror}): {ALLOW}") from error


def end_with_parent() -> None:
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def build_root(spec: Spec) -> None:
    root = Path(spec["root"])
    mount(None, Path("/"), None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, size in ((HOME, spec["home_bytes"]), ("/tmp", spec["home_bytes"])):
        mount("tmpfs", make(root, path), "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=777")
    for path in spec["read_only"]:
        bind(Path(path), root)
        read_only(inside(root, path))
    for path in spec["hidden"]:
        if inside(root, path).is_dir():
            mount("tmpfs", inside(root, path), "tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, "size=4k")
    for device in DEVICES:
        bind(Path("/dev") / device, root)
    make(root, "/proc")
    mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV)
    bind(Path(spec["shared"]), root)
    make(root, "/etc")
    (root / "etc/passwd").write_text(f"student:x:1000:1000::{HOME}:/bin/sh\n")
    if data := spec["data"]:
        mount(data, make(root, f"{HOME}/data"), None, MS_BIND | MS_REC)
        read_only(root / HOME.lstrip("/") / "data")
    old = make(root, "/old")
    number = SYS_PIVOT_ROOT[os.uname().machine]
    check(libc.syscall(number, os.fsencode(root), os.fsencode(old)), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "umount")
    Path("/old").rmdir()
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # else student code could have capabilities in one
    read_only(Path("/"), recursive=False)
    os.chdir(HOME)


def bind(source: Path, root: Path) -> None:
    """The same path inside; a link such as /bin stays a link."""
    target = inside(root, str(source))
    if not os.path.lexists(source) or os.path.lexists(target):
        return
    if source.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source.readlink())
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    mount(str(source), target, None, MS_BIND | MS_REC)


def inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def make(root: Path, path: str) -> Path:
    folder = inside(root, path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_only(target: Path, *, recursive: bool = True) -> None:
    if target.is_symlink():
        return
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    arguments = (ctypes.c_int(AT_FDCWD), os.fsencode(target), ctypes.c_uint(flags), ctypes.byref(attributes), size)
    check(libc.syscall(SYS_MOUNT_SETATTR, *arguments), f"read-only {target}")


def limit(spec: Spec) -> None:
    bounds = {
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_FSIZE: spec["file_bytes"],
        resource.RLIMIT_CPU: spec["cpu_seconds"],
        resource.RLIMIT_NPROC: spec["processes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 256,
    }
    for which, bound in bounds.items():
        resource.setrlimit(which, (bound, bound))


def drop_capabilities() -> None:
    for capability in range(LAST_CAPABILITY):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers that this kernel lacks
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def mount(source: str | None, target: Path, kind: str | None, flags: int, data: str = "") -> None:
    arguments = (
        source.encode() if source else None,
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    check(libc.mount(*arguments), f"mount {target}")


def check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


if __name__ == "__main__":
    main()
