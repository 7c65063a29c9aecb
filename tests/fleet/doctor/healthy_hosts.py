"""Hosts as doctor finds them in good health; a test changes what is wrong with its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from disagg.config import load
from disagg.fleet.doctor.gather import HostReadings
from disagg.fleet.facts.host import (
    Clock,
    HardwareFacts,
    HostFacts,
    InstalledService,
    Python,
    Release,
    Systemd,
)
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.models.inventory import RequiredModel, StoredModel
from disagg.nvidia import GPU
from disagg.token import token_digest
from tests.planning.published_configs import QWEN, QWEN_FP8
from tests.testbed.bed import HOSTS_TOML

FLEET = load(HOSTS_TOML)
TOKEN = "a-token-for-tests-only"
RELEASE, ENVIRONMENT = "a" * 16, "e" * 16
CONFIG = QWEN
FP8_SOURCE = "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8"
DIGESTS = {"tokenizer": "aa", "chat template": "bb"}


def spark(name: str = "dgx-spark-1", **changes: Any) -> Any:
    host = FLEET.hosts[name]
    hardware = HardwareFacts(
        memory=119 << 30,
        available=100 << 30,
        smi="/usr/bin/nvidia-smi",
        gpus=(GPU("NVIDIA GB10", "580.95.05"),),
    )
    facts = HostFacts(
        host=name,
        os="Linux",
        arch="aarch64",
        user="ubuntu",
        uid=1000,
        home="/home/ubuntu",
        disk_free=800 << 30,
        hardware=hardware,
        version="0.1.0",
        pythons=(Python("/usr/bin/python3", (3, 12, 3)),),
        systemd=Systemd(255, True, True),
        folder=True,
        current=RELEASE,
        releases=(Release(name, RELEASE, ENVIRONMENT),),
        environments={ENVIRONMENT: True},
        token_digests=(token_digest(TOKEN),),
        token_mode="-rw-------",
        pid=4711,
        release=RELEASE,
    )
    held = StoredModel(FP8_SOURCE, "complete", 30 << 30, "/f", "/r", "a1" * 20, config=QWEN_FP8, digests=DIGESTS)
    seen = HostReadings(
        host,
        facts,
        Clock(0.004, 0.02),
        0.012,
        "/usr/bin/python3",
        {host.model: RequiredModel(host, held.source)},
        {host.model: held},
    )
    return change(seen, **changes)


def mac(name: str = "mac-studio-2", **changes: Any) -> Any:
    host = FLEET.hosts[name]
    facts = HostFacts(
        host=name,
        os="Darwin",
        arch="arm64",
        user="studio",
        home="/Users/studio",
        disk_free=900 << 30,
        hardware=HardwareFacts(memory=128 << 30, wired_limit=0, rdma="disabled"),
        version="0.1.0",
        pythons=(Python("/opt/homebrew/bin/python3", (3, 12, 9)),),
        launchd=True,
        sudo=True,
        installed={f"launchd:{name}": InstalledService("d", True)},
        folder=True,
        current=RELEASE,
        releases=(Release(name, RELEASE, ENVIRONMENT),),
        environments={ENVIRONMENT: True},
        token_digests=(token_digest(TOKEN),),
        token_mode="-rw-------",
        pid=815,
        release=RELEASE,
    )
    held = StoredModel(
        "mlx-community/Qwen3-8bit", "complete", 32 << 30, "/f", "/r", "b2" * 20, config=CONFIG, digests=DIGESTS
    )
    reach = {"169.254.150.103 22": 0}
    seen = HostReadings(
        host,
        facts,
        Clock(-0.003, 0.02),
        0.015,
        "/opt/homebrew/bin/python3",
        {host.model: RequiredModel(host, held.source)},
        {host.model: held},
        reach,
    )
    return change(seen, **changes)


def change(seen: Any, host: Any = None, facts: Any = None, hardware: Any = None, **changes: Any) -> Any:
    """The same host with other values in its parts."""
    return replace(
        seen,
        host=replace(seen.host, **(host or {})),
        facts=replace(seen.facts, hardware=replace(seen.facts.hardware, **(hardware or {})), **(facts or {})),
        **changes,
    )


def status(seen: Any, state: Any = "healthy", **changes: Any) -> Any:
    blank = HostStatus(seen.host.name, seen.host.roles, seen.host.model, seen.host.url, state, version="0.1.0")
    return replace(blank, **changes)


def with_model(seen: Any, **changes: Any) -> Any:
    """The readings, with another state of the host's model."""
    name = seen.host.model
    return replace(seen, stored={name: replace(seen.stored[name], **changes)})
