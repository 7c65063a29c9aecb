"""What the probe printed on machines that are not at hand, and a fleet that fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from disagg.config import Deploy, EngineOptions, Fleet, Host, KeeperSettings, Model
from disagg.fleet.deploy.release import Installation, TargetState, target_state
from disagg.fleet.deploy.requirements import PackageRequirements
from disagg.fleet.deploy.steps import Plan
from disagg.fleet.facts.host import HostFacts, parse
from disagg.fleet.facts.probe import ProbeOutput

FOLDER = Path(__file__).with_name("facts")
NEEDS = PackageRequirements(
    (
        "anyio>=4.5",
        "torch>=2.6; extra == 'prefill'",
        "mlx>=0.32.4; sys_platform == 'darwin' and extra == 'decode'",
        "mlx[cpu]>=0.32.4; sys_platform == 'linux' and extra == 'decode'",
        "prometheus-client>=0.21; extra == 'gateway'",
        "pytest; extra == 'dev'",
    ),
    "anyio==4.16.0\ntorch==2.13.0\n",
)


def facts(name: str, host: str = "dgx-spark-1", **changes: Any) -> HostFacts:
    return replace(parse(host, ProbeOutput.parse(host, (FOLDER / f"{name}.facts").read_text())), **changes)


def spark(**changes: Any) -> Host:
    engine = EngineOptions("transformers", device="cuda")
    return replace(Host("dgx-spark-1", "10.0.0.3", ("prefill",), "qwen", engine, 8000), **changes)


def studio(**changes: Any) -> Host:
    engine = EngineOptions("mlx", device="gpu")
    host = Host("mac-studio-1", "10.0.0.1", ("decode",), "qwen", engine, 8001, kv_port=9001, service="launchd")
    return replace(host, **changes)


def front(**changes: Any) -> Host:
    return replace(Host("front", "10.0.0.2", ("gateway",), "", EngineOptions("none"), 8080), **changes)


def fleet(*hosts: Host, deploy: Deploy | None = None) -> Fleet:
    sources: dict[str, str] = {"transformers": "owner/qwen", "mlx": "~/models/qwen"}
    model = Model("qwen", {"transformers": "owner/qwen", "mlx": "/here/models/qwen"}, 4096, (), sources)
    named = {host.name: host for host in hosts or (spark(), studio())}
    return Fleet("lab", Path("/here/hosts.toml"), {"qwen": model}, named, deploy=deploy or Deploy())


def here(of: Fleet, package: dict[str, bytes] | None = None, token: str = "secret-of-the-fleet") -> Installation:
    return Installation(of, package or {"disagg/__init__.py": b""}, NEEDS, (token,))


def several(host: Host, *models: str, ports: int = 8100) -> Host:
    """The host with these models, of which each is one of `fleet_of`."""
    keeping = KeeperSettings(range(ports, ports + 2 * len(models)))
    return replace(host, model="", kv_port=None, models=models, keeping=keeping)


def fleet_of(models: Sequence[str], *hosts: Host) -> Fleet:
    """A fleet with models of these names, which the hub has for both roles."""
    made = {name: Model(name, {"transformers": f"owner/{name}", "mlx": f"mlx/{name}"}, 4096) for name in models}
    return Fleet("lab", Path("/here/hosts.toml"), made, {host.name: host for host in hosts})


def wanted(host: Host, facts: HostFacts, deploy: Deploy | None = None) -> TargetState:
    found = target_state(here(fleet(host, deploy=deploy)), host, facts)
    assert isinstance(found, TargetState), found
    return found


def names(plan: Plan) -> list[str]:
    return [step.name for step in plan.steps]
