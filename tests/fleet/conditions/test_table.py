"""Each condition, broken once: `disagg deploy` refuses or notes it, its plan shows it, `disagg doctor` reports it."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg.cli.views.plans import plan_view
from disagg.config import Deploy, EngineOptions, Fleet, Host, Model
from disagg.fleet.conditions.table import CONDITIONS, Subject, model_verdict
from disagg.fleet.deploy.deployment import Deployment, DeployResult, planner
from disagg.fleet.doctor.gather import HostReadings
from disagg.fleet.doctor.host import findings
from disagg.fleet.facts.host import HardwareFacts, HostFacts, Python
from disagg.fleet.machine.machine import CommandResult
from disagg.nvidia import GPU
from tests.fleet.facts.fixture_facts import facts, fleet, here, spark, studio
from tests.values import printed

GIB = 1 << 30
HARDWARE = HardwareFacts(memory=119 * GIB, smi="/usr/bin/nvidia-smi", gpus=(GPU("NVIDIA GB10", "580.1"),))
RANKS = EngineOptions("vllm", device="cuda", tensor_parallel=2)
NODE = EngineOptions("vllm", device="cuda", tensor_parallel=2, nnodes=2, head_address="10.0.0.1:29500")


@dataclass(frozen=True)
class Broken:
    """A host that does not meet a condition, and the beginning of what is said of it."""

    condition: str
    text: str
    host: Host = field(default_factory=spark)
    system: str = "spark_bare"
    changes: dict[str, Any] = field(default_factory=dict)
    deploy: Deploy = field(default_factory=Deploy)
    source: str = "owner/qwen"

    @property
    def fleet(self) -> Fleet:
        of = fleet(self.host, deploy=self.deploy)
        return replace(of, models={"qwen": Model("qwen", {self.host.engine.name: self.source}, 4096)})

    @property
    def facts(self) -> HostFacts:
        return facts(self.system, self.host.name, **({"hardware": HARDWARE} | self.changes))


BROKEN = [
    Broken("system", "FreeBSD is neither Linux nor macOS", changes={"os": "FreeBSD"}),
    Broken("system", "the home folder '/home/a:b' contains characters", changes={"home": "/home/a:b"}),
    Broken("engine", "Linux has no mps device", spark(engine=EngineOptions("transformers", device="mps"))),
    Broken("engine", "vLLM runs on Linux", spark(engine=EngineOptions("vllm")), "studio_bare"),
    Broken("engine", "MLX reaches no GPU on Linux", studio(service="systemd")),
    Broken("python", "there is no uv", deploy=Deploy(installer="uv")),
    Broken(
        "python", "every Python there is older than 3.11: /p is 3.8.1", changes={"pythons": (Python("/p", (3, 8, 1)),)}
    ),
    Broken(
        "python",
        "every Python there is older than 3.11: /p is 3.10.2",
        changes={"pythons": (Python("/p", (3, 10, 2)),)},
    ),
    Broken("python", "there is no Python 3.11 or newer", changes={"pythons": ()}),
    Broken("python", "/opt/x does not run there", spark(python="/opt/x"), changes={"no_python": "/opt/x"}),
    Broken("disk", "/home/nvidia is read-only", changes={"writable": False}),
    Broken("disk", "/home/nvidia has 1.0 GiB free, and this needs about 9.1 GiB", changes={"disk_free": GIB}),
    Broken("service", "systemd does not run there", changes={"systemd": None}),
    Broken("service", "there is no launchd", studio(), "studio_bare", {"launchd": False}),
    Broken("driver", 'engine.device is "cuda", and there is no driver', changes={"hardware": HardwareFacts()}),
    Broken(
        "driver",
        "driver 570.86.10 of NVIDIA GB10 is older than 580",
        changes={"hardware": replace(HARDWARE, gpus=(GPU("NVIDIA GB10", "570.86.10"),))},
    ),
    Broken("nodes", "dgx-spark-1 is one of 2 nodes, and no host is the one of node_rank 1", spark(engine=NODE)),
    Broken("cards", "tensor_parallel of dgx-spark-1 is 2, and the machine has 1 GPU", spark(engine=RANKS)),
    Broken("memory", "qwen needs 224 GiB", source="openai/gpt-oss-120b"),
    Broken(
        "memory",
        "qwen needs 92.2 GiB",
        studio(engine=EngineOptions("mlx", device="gpu", max_kv_bytes=32 * GIB)),
        "studio_bare",
        {"hardware": HardwareFacts(memory=80 * GIB)},
        source="mlx-community/gpt-oss-120b-MXFP4-Q8",
    ),
]


class Silent:
    """A machine whose probe prints nothing."""

    name = "silent"

    def run(self, argv: Any, **options: Any) -> CommandResult:
        return CommandResult(0, "end\n", "")

    def close(self) -> None:
        pass


def planned(broken: Broken) -> DeployResult:
    machine: Any = Silent()
    decide = planner(here(broken.fleet))
    with Deployment(
        [broken.host], lambda host, _: decide(host, broken.facts), "deploy", connect=lambda host: machine
    ) as deployment:
        return deployment.plan()[0]


def shown(report: DeployResult) -> str:
    console = Console(file=io.StringIO(), width=100_000)
    console.print(plan_view([report]))
    return printed(console)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda one: f"{one.condition}: {one.text}")
def test_deploy_plan_and_doctor_speak_of_each_condition_in_the_same_words(broken: Broken) -> None:
    subject = Subject(broken.fleet, broken.host, broken.facts, disk=9 * GIB + (64 << 20))
    (condition,) = (one for one in CONDITIONS if one.name == broken.condition)
    (found,) = condition.unmet(subject)
    assert found.text.startswith(broken.text) and found.hint

    report = planned(broken)
    assert report.plan is not None
    refused = [(one.cause, one.hint) for one in report.plan.refusals]
    if condition.refuses and found.level == "fault":
        assert (found.text, found.hint) in refused
    else:
        assert f"{found.text}: {found.hint}" in report.plan.notes
    assert found.text in shown(report) and found.hint in shown(report)

    said = findings(broken.fleet, HostReadings(broken.host, broken.facts), None, None)
    (finding,) = (one for one in said if one.text == found.text)
    assert (finding.check, finding.level) == (found.check, found.level)
    assert finding.hint == f"{found.hint}; then: disagg deploy --host {broken.host.name}"


def test_no_condition_is_left_out() -> None:
    assert {one.condition for one in BROKEN} | {"verdict"} == {one.name for one in CONDITIONS}, "that has its own test"


@pytest.mark.parametrize(("host", "system"), [(spark(), "spark_bare"), (studio(), "studio_bare")])
def test_a_host_that_meets_all_conditions_is_planned_and_well(host: Host, system: str) -> None:
    met = Broken("", "", host, system, {} if system == "spark_bare" else {"hardware": HardwareFacts(memory=512 * GIB)})
    assert [one for condition in CONDITIONS for one in condition.unmet(Subject(met.fleet, host, met.facts))] == []
    report = planned(met)
    assert report.plan is not None and report.plan.refusals == ()


@pytest.mark.parametrize(
    ("config", "level", "text"),
    [
        ({"model_type": "llama", "max_position_embeddings": 8192}, "ok", "qwen (llama) with transformers: exact"),
        ({"model_type": "gpt_oss"}, "ok", "qwen (gpt_oss) with transformers: patched"),
        (
            {"model_type": "llava", "text_config": {"model_type": "mistral"}},
            "note",
            "qwen (llava) with transformers: unknown: with a part of type mistral it was not compared",
        ),
        ({"model_type": "minimax"}, "fault", "qwen (minimax) with transformers: refused: mlx-lm has another model"),
        (
            {"model_type": "nothing"},
            "warning",
            "qwen (nothing) with transformers: refused: transformers 5.23 and mlx-lm 0.32 do not both know",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plan_and_doctor_state_the_verdict_on_a_model_by_its_config_alone(
    tmp_path: Path, config: dict[str, Any], level: str, text: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    host = spark(engine=EngineOptions("transformers", device="cpu"))
    subject = Broken("verdict", text, host, source=str(tmp_path))
    report = planned(subject)
    assert report.plan is not None
    if level == "fault":
        assert [one.cause for one in report.plan.refusals if one.cause.startswith(text)]
    else:
        assert text in shown(report)
    (found,) = model_verdict(subject.fleet, host, config)
    assert (found.level, found.text[: len(text)]) == (level, text)
    said = findings(subject.fleet, HostReadings(host, subject.facts), None, None)
    assert [one.level for one in said if one.check == "verdict"] == [level]
