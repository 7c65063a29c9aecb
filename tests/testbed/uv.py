"""A stand-in for uv on the hosts of the test bed, whose environments are there at once and have torch and mlx."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.programs import fake_uv
from tests.testbed.bed import Bed


def install_uv(bed: Bed) -> None:
    """On every host. An environment is made at once, and runs the host's ~/guest."""
    for host in bed.hosts.values():
        uv = host.home / ".local/bin/uv"
        if uv.exists():
            continue
        _make_guest(host.home / "guest", bed.real, without_torch=host.mac)
        fake_uv(uv, "$HOME/guest/bin/python")
        owner = host.home.stat()
        for top in ("guest", ".local"):
            for path in (host.home / top, *(host.home / top).rglob("*")):
                os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _make_guest(folder: Path, other_account: bool, *, without_torch: bool) -> None:
    """An interpreter that the host's account may run, which sees the packages of this test run.

    without_torch: as on a Mac, whose servers start in half the time because transformers finds no torch there.
    """
    version = "{}.{}".format(*sys.version_info)
    system = Path(f"/usr/bin/python{version}") if other_account else Path(sys.base_prefix, "bin", f"python{version}")
    if not system.exists():
        pytest.skip(f"needs {system}, which the bed's accounts can run")
    packages = folder / "lib" / f"python{version}" / "site-packages"
    for place in (folder / "bin", packages):
        place.mkdir(parents=True)
    (folder / "bin/python").symlink_to(system)
    (folder / "pyvenv.cfg").write_text(f"home = {system.parent}\n")
    lines = [path for path in sys.path if path.endswith("site-packages")]
    if without_torch:
        lines.append("import sys; sys.modules['torch'] = None")
    (packages / "packages.pth").write_text("".join(f"{line}\n" for line in lines))
