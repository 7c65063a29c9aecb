"""Make the locks of the hosts' environments: disagg/fleet/locks/NAME-PLATFORM.txt.

    python -m scripts.lock [NAME]...      all of them, or those of these names

Needs uv on PATH, and the package index that uv is configured with. Reads metadata only, and asks for the size of each
wheel. Run it after a change of the dependencies in pyproject.toml or of constraints.txt.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from packaging.utils import canonicalize_name

from disagg.fleet.deploy.packages.locks import FOLDER, PLATFORMS, Locked, locked_packages, render

ROOT: Final = Path(__file__).parents[1]
CONSTRAINTS: Final = ROOT / "disagg/fleet/constraints.txt"
PYTHON: Final = "3.12"
_UV_PLATFORMS: Final[Mapping[str, str]] = {
    "linux-aarch64": "aarch64-manylinux_2_35",
    "linux-x86_64": "x86_64-manylinux_2_35",
    "macosx-arm64": "aarch64-apple-darwin",
}
"""Ubuntu 22.04 and later; macOS 14 and later."""
_RESOLVE_S: Final = 600.0
_HEAD_S: Final = 30.0


@dataclass(frozen=True)
class Kind:
    """One environment. extras: of pyproject.toml. free: the packages that constraints.txt does not pin here; None for
    all. platforms: where it runs."""

    extras: tuple[str, ...]
    free: frozenset[str] | None = frozenset()
    platforms: tuple[str, ...] = ("linux-aarch64", "linux-x86_64")


KINDS: Final[Mapping[str, Kind]] = {
    "prefill": Kind(("prefill",)),
    # transformers and its kernels belong together, and the newest pair need not be the pinned one.
    "prefill-quantize": Kind(("prefill", "quantize"), frozenset({"transformers"})),
    "vllm": Kind(("vllm",), None),
    "decode": Kind(("decode",), platforms=tuple(PLATFORMS)),
    "gateway": Kind(("gateway",), platforms=tuple(PLATFORMS)),
}


def main(names: Sequence[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, kind in KINDS.items():
        if names and name not in names:
            continue
        for platform in kind.platforms:
            target = FOLDER / f"{name}-{platform}.txt"
            known = locked_packages(target.read_text(encoding="utf-8")) if target.exists() else {}
            packages = dict(_sized(_resolved(kind, platform), known))
            target.write_text(render(packages, kind.extras, platform, PYTHON), encoding="utf-8")
            total = sum(package.nbytes for package in packages.values())
            print(f"{target.name}: {len(packages)} packages, {total / 1e9:.2f} GB")


def _resolved(kind: Kind, platform: str) -> dict[str, tuple[str, str]]:
    """Name -> version and address of the wheel, as uv resolves the extras for a platform."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, lock = Path(folder) / "constraints.txt", Path(folder) / "pylock.lock.toml"
        constraints.write_text("".join(_constraints(kind.free)), encoding="utf-8")
        argv = ["uv", "pip", "compile", "--quiet", "--only-binary", ":all:", "--format", "pylock.toml"]
        argv += ["--python-version", PYTHON, "--python-platform", _UV_PLATFORMS[platform]]
        argv += ["--constraints", str(constraints), "--output-file", str(lock)]
        argv += [word for extra in kind.extras for word in ("--extra", extra)]
        environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
        subprocess.run([*argv, str(ROOT / "pyproject.toml")], check=True, timeout=_RESOLVE_S, env=environment)
        packages: list[dict[str, Any]] = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    return {
        canonicalize_name(one["name"]): (one["version"], one["wheels"][0]["url"]) for one in packages if "wheels" in one
    }


def _constraints(free: frozenset[str] | None) -> Iterator[str]:
    if free is None:
        return
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines(keepends=True):
        if canonicalize_name(re.split("==", line)[0].strip()) not in free:
            yield line


def _sized(resolved: Mapping[str, tuple[str, str]], known: Mapping[str, Locked]) -> Iterator[tuple[str, Locked]]:
    """The packages with the size of their wheels; only those that the lock did not have are asked for."""
    with httpx.Client(timeout=_HEAD_S, follow_redirects=True) as client, ThreadPoolExecutor(8) as pool:

        def size(name: str) -> int:
            version, address = resolved[name]
            if (before := known.get(name)) is not None and before.version == version:
                return before.nbytes
            return int(client.head(address).raise_for_status().headers["Content-Length"])

        for name, nbytes in zip(sorted(resolved), pool.map(size, sorted(resolved)), strict=True):
            yield name, Locked(resolved[name][0], nbytes)


if __name__ == "__main__":
    main(sys.argv[1:])
