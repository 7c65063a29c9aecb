"""docs/monitoring: the Grafana dashboard and the alert rules name figures that the gateway really has."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disagg.errors import RequestEndedHosts, ServerUnavailable
from disagg.gateway.dialects.base import GatewayRequest, Head
from disagg.gateway.dialects.problems import problem_of
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.request import Observers
from disagg.inference.types import Stage
from tests.gateway.fake_client import FakeClient, completion

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
BOARD = json.loads((FOLDER / "grafana.json").read_text())
RULES = importlib.import_module("yaml").safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
OF_PROMETHEUS = {"up"}


def samples() -> dict[str, set[str]]:
    """The labels of every sample that the gateway can export, by its name."""
    watch = GatewayWatch(FakeClient())  # type: ignore[arg-type]  # a fake
    request = GatewayRequest(model="m", prompts=({"prompt": "x"},))
    observers: Observers = watch.observers
    for fails in (None, ServerUnavailable("x"), RequestEndedHosts("x")):
        observed = observers.accept(Head(request, "r", 0.0), "chat", "m", None)
        observed.entered(0, Stage("decode", "fallback", None, "d", 1, 0, "prefill failed"))
        observed.generated(0, 1)
        observed.generated(0, 1)
        if not fails:
            done = completion("one two")
            object.__setattr__(done.metrics, "method", "fallback")
            observed.completed(0, done)
        observed.ended(problem_of(fails) if fails else None)
    observers.accept(Head(request, "r", 0.0), "chat", "m", None).ended()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(watch.metrics(of_keys=True).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
        if family.name.startswith("disagg_host"):
            found.setdefault(family.name, {"host", "role", "model_name"})
        if family.name == "disagg_kv_audits":
            found.setdefault(f"{family.name}_total", {"host", "sender", "verdict", "model_name"})
    return found


EXPORTED = samples()


def panel_queries() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("query", [*panel_queries(), *(rule["expr"] for rule in RULES)])
def test_every_figure_and_label_of_a_query_is_exported(query: str) -> None:
    names = set(re.findall(r"\b((?:vllm:|disagg_)\w+|up)\b(?=[{\[ )])", query))
    assert names and names <= EXPORTED.keys() | OF_PROMETHEUS
    for name, selected in re.findall(r"((?:vllm:|disagg_)\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)(?:=~|!=|=)", selected)) <= EXPORTED[name]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_a_patience_a_severity_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+m", rule["for"]) and rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}


def test_the_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
