from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.config import load
from disagg.errors import HostUnreachable, UsageError
from disagg.fleet.link.measure import MeasuredLink, MeasurementBounds
from disagg.fleet.link.route import NetworkPath
from disagg.fleet.link.survey import LinkSurvey, exit_code, kv_pairs, pairs_between, survey
from disagg.fleet.machine.connect import machine_for
from tests.fleet.facts.fixture_facts import fleet_of, several, spark, studio
from tests.testbed.bed import HOSTS_TOML, Bed

FLEET = load(HOSTS_TOML)
SPARK, MAC = FLEET.hosts["dgx-spark-1"], FLEET.hosts["mac-studio-2"]
SHORT = MeasurementBounds(seconds=0.5, bytes=16 << 20)


def measured(gbits: Any) -> Any:
    return MeasuredLink(SPARK.name, MAC.name, MAC.address, NetworkPath(MAC.address), int(gbits * 1e9 / 8), 1.0)


def test_bandwidth_that_hides_is_tokens_per_second_times_bytes_per_token() -> None:
    """10k tok/s of Qwen3-Coder in bf16 needs 7.9 Gb/s."""
    one = LinkSurvey(SPARK, MAC, (), measured(7.8643), 98304)
    assert one.hidden_tokens_per_s == pytest.approx(10_000, rel=1e-3)
    assert replace(one, kv_bytes_per_token=None).hidden_tokens_per_s is None
    assert replace(one, link=None).hidden_tokens_per_s is None


def test_one_host_chooses_its_links_and_two_hosts_the_link_between_them() -> None:
    twin = replace(SPARK, name="dgx-spark-9")
    fleet = replace(FLEET, hosts={**FLEET.hosts, twin.name: twin})
    assert pairs_between(fleet, None, None) == kv_pairs(fleet)
    assert pairs_between(fleet, None, MAC) == [(SPARK, MAC), (twin, MAC)]
    assert pairs_between(fleet, twin, None) == [(twin, MAC)]
    assert pairs_between(fleet, MAC, SPARK) == [(MAC, SPARK)]
    with pytest.raises(UsageError, match="has no prefill and decode host of one model"):
        pairs_between(replace(fleet, hosts={MAC.name: MAC}), None, None)


def test_a_model_that_no_host_has_yet_is_sized_by_its_name(bed: Bed) -> None:
    (one,) = survey(bed.fleet, [(bed.host("dgx-spark-1"), bed.host("mac-studio-2"))], bounds=SHORT)
    assert one.kv_bytes_per_token == 98304 and one.hidden_tokens_per_s and exit_code([one]) == 0


def test_every_host_that_fails_is_reported(bed: Bed) -> None:
    def connect(host: Any) -> Any:
        nowhere = machine_for(replace(host, address="127.0.0.1", ssh_port=1))
        return nowhere if host.name != "dgx-spark-2" else machine_for(host)

    links = survey(bed.fleet, kv_pairs(bed.fleet), connect=connect, bounds=SHORT)
    assert [len(one.findings) for one in links] == [2, 1]
    assert all(isinstance(one.error, HostUnreachable) for one in links) and exit_code(links) == 4


def test_the_link_of_two_hosts_with_several_models_is_one() -> None:
    prefill, decode = several(spark(), "a", "b"), several(studio(), "b", "a")
    fleet = fleet_of(("a", "b"), prefill, decode)
    assert [(one.name, other.name) for one, other in kv_pairs(fleet)] == [("dgx-spark-1", "mac-studio-1")]
    assert LinkSurvey(prefill, decode, ()).to_json()["model"] == "a, b"
