"""The committed locks: made from pyproject.toml's ranges, for the platforms that hosts have."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from disagg.config import Deploy, EngineOptions, Host
from disagg.fleet.deploy.environment import Environment, environment
from disagg.fleet.deploy.requirements import (
    CONSTRAINTS,
    LOCKS,
    PackageRequirements,
    committed_locks,
    extras,
    lock_name,
    locked_packages,
)
from disagg.fleet.facts.host import HostFacts
from scripts.lock import KINDS, PYTHON
from tests.fleet.facts.fixture_facts import facts, spark, studio

PROJECT: Final[dict[str, Any]] = tomllib.loads((LOCKS.parents[2] / "pyproject.toml").read_text())["project"]
NAMES: Final = [f"{name}-{platform}" for name, kind in KINDS.items() for platform in kind.platforms]
MARKERS: Final = {
    "linux-aarch64": {"sys_platform": "linux", "platform_machine": "aarch64", "platform_system": "Linux"},
    "linux-x86_64": {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux"},
    "macosx-arm64": {"sys_platform": "darwin", "platform_machine": "arm64", "platform_system": "Darwin"},
}


def required(wanted: tuple[str, ...], platform: str) -> Iterator[Requirement]:
    """What disagg with these extras requires on a platform, extras of its own followed."""
    target = {**MARKERS[platform], "python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    lines = [line for extra in wanted for line in PROJECT["optional-dependencies"][extra]]
    for requirement in map(Requirement, lines):
        if requirement.name == "disagg":
            yield from required(tuple(requirement.extras), platform)
        elif requirement.marker is None or requirement.marker.evaluate(target):
            yield requirement
    yield from map(Requirement, PROJECT["dependencies"])


def test_there_is_a_lock_for_every_environment_on_every_platform_and_no_other() -> None:
    assert sorted(committed_locks()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_meets_the_ranges_of_pyproject_and_states_sizes_and_hashes(name: str) -> None:
    kind = next(kind for key, kind in KINDS.items() if re.fullmatch(f"{key}-(linux|macosx)-.*", name))
    platform = name.rpartition("-")[0].rpartition("-")[2] + "-" + name.rpartition("-")[2]
    packages = locked_packages(committed_locks()[name])
    assert all(one.nbytes > 0 and one.hashes for one in packages.values()), "python -m scripts.lock"
    for requirement in required(kind.extras, platform):
        locked = packages.get(canonicalize_name(requirement.name))
        assert locked is not None, f"{requirement}: run python -m scripts.lock {kind.extras}"
        assert requirement.specifier.contains(locked.version, prereleases=True), f"{requirement}: {locked.version}"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("vllm", "prefill-quantize"))])
def test_a_lock_has_the_versions_that_the_tests_run_with(name: str) -> None:
    tested = locked_packages(CONSTRAINTS.read_text())
    packages = locked_packages(committed_locks()[name])
    assert {
        key: one.version for key, one in packages.items() if key in tested and tested[key].version != one.version
    } == {}


def test_frameworks_come_with_cuda_for_both_kinds_of_linux_and_with_metal_for_macs() -> None:
    for name in ("prefill-linux-aarch64", "vllm-linux-aarch64", "vllm-linux-x86_64", "prefill-linux-x86_64"):
        assert {"torch", "nvidia-cublas", "triton"} <= locked_packages(committed_locks()[name]).keys()
    assert "mlx-metal" in locked_packages(committed_locks()["decode-macosx-arm64"])


def test_the_locked_vllm_is_one_that_the_connector_is_written_for() -> None:
    from disagg.engines.vllm.load import VERSIONS, version_fits

    (declared,) = (one for one in required(("vllm",), "linux-aarch64") if one.name == "vllm")
    low, high = (".".join(map(str, version)) for version in VERSIONS)
    assert set(str(declared.specifier).split(",")) == {f">={low}", f"<{high}"}
    assert version_fits(locked_packages(committed_locks()["vllm-linux-aarch64"])["vllm"].version)


def test_transformers_can_use_the_locked_kernels_so_that_mxfp4_stays_packed() -> None:
    packages = locked_packages(committed_locks()["prefill-quantize-linux-aarch64"])
    assert {"torchao", "kernels", "transformers"} <= packages.keys()


@pytest.mark.parametrize(
    ("host", "found", "lock"),
    [
        (spark(), facts("spark_bare"), "prefill-linux-aarch64"),
        (spark(), facts("spark_bare", arch="x86_64"), "prefill-linux-x86_64"),
        (spark(engine=EngineOptions("vllm")), facts("spark_bare"), "vllm-linux-aarch64"),
        (
            spark(engine=EngineOptions("transformers", quantization="mxfp4")),
            facts("spark_bare"),
            "prefill-quantize-linux-aarch64",
        ),
        (studio(), facts("studio_bare"), "decode-macosx-arm64"),
        (spark(engine=EngineOptions("simulated")), facts("spark_bare"), "prefill-linux-aarch64"),
        (spark(), facts("spark_bare", arch="riscv64"), ""),
    ],
)
def test_a_host_gets_the_lock_of_its_engine_and_platform_alone(host: Host, found: HostFacts, lock: str) -> None:
    assert lock_name(extras(host), found) == lock
    needed = PackageRequirements(("anyio>=4.5", "vllm>=0.32; extra == 'vllm'"), "anyio==4.16.0\n", committed_locks())
    made = environment(host, Deploy(), found, needed)
    assert isinstance(made, Environment)
    text = committed_locks()[lock] if lock else "anyio==4.16.0\n"
    assert made.locked == locked_packages(text) and made.all_hashed == bool(lock)
    assert any(line.startswith("vllm") for line in made.requirements) == lock.startswith("vllm")
    assert bool(made.packages) == bool(lock)
