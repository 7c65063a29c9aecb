from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Fleet, load
from disagg.errors import HostKeyRefused, HostUnreachable
from disagg.fleet.doctor.examine import examine
from disagg.fleet.lifecycle.state import State
from disagg.fleet.link.measure import MeasurementBounds
from disagg.fleet.link.survey import kv_pairs
from tests.testbed.bed import Bed

SHORT = MeasurementBounds(seconds=0.4, bytes=32 << 20)


@dataclass
class Patient:
    """The fleet of the bed, examined when called."""

    fleet: Fleet
    state: State

    def __call__(self, *names: str, bounds: MeasurementBounds = SHORT) -> Any:
        return examine(self.fleet, self.state, names, bounds=bounds)


@pytest.fixture
def patient(bed: Bed, tmp_path: Path) -> Patient:
    bed.need_links()
    bed.need_bare_hosts()
    fleet = load(bed.write_hosts_toml(tmp_path / "hosts.toml"))
    return Patient(fleet, State.of(fleet, tmp_path / "state"))


def of(diagnosis: Any, host: Any) -> dict[str, Any]:
    (report,) = (one for one in diagnosis.hosts if one.host.name == host)
    return {finding.check: finding for finding in report.findings}


def test_bare_hosts_are_examined_and_their_links_measured(bed: Bed, patient: Patient) -> None:
    diagnosis = patient()
    assert [one.host.name for one in diagnosis.hosts] == list(patient.fleet.hosts)
    for report in diagnosis.hosts:
        checks = {finding.check: finding for finding in report.findings}
        assert checks["ssh"].level == checks["python"].level == checks["disk"].level == "ok"
        assert checks["disagg"].hint == f"disagg deploy --host {report.host.name}"
        assert checks["model"].level == "warning" and checks["model"].hint.startswith("disagg deploy")
    assert [(one.prefill.name, one.decode.name) for one in diagnosis.pairs] == [
        ("dgx-spark-1", "mac-studio-2"),
        ("dgx-spark-2", "mac-studio-1"),
    ]
    assert all(one.link is not None and one.link.bits_per_s for one in diagnosis.pairs)
    (clocks,) = diagnosis.fleet
    assert clocks.level == "ok" and re.search(r"\d+ ms", clocks.text)


def test_a_mac_that_calls_nobody_is_not_checked_for_the_local_network(patient: Patient) -> None:
    checks = of(patient("mac-studio-1"), "mac-studio-1")
    assert checks["memory"].text == "512 GiB"
    assert "local network" not in checks


def test_a_mac_that_delivers_kv_is_checked_for_the_local_network(patient: Patient, tmp_path: Path) -> None:
    hosts = dict(patient.fleet.hosts)
    mac, decode = hosts["mac-studio-1"], hosts["mac-studio-2"]
    hosts[mac.name] = replace(
        mac, roles=("prefill",), model=decode.model, engine=EngineOptions("transformers", device="mps"), kv_port=None
    )
    fleet = replace(patient.fleet, hosts=hosts)
    diagnosis = examine(fleet, State.of(fleet, tmp_path / "state"), [mac.name], bounds=SHORT)
    assert of(diagnosis, mac.name)["local network"].text == "open over SSH"


def test_a_shaped_link_is_far_below_its_interface(bed: Bed, patient: Patient) -> None:
    with bed.limited("mac-studio-2", 100):
        diagnosis = patient("dgx-spark-1", bounds=MeasurementBounds(seconds=1.0))
    (pair,) = diagnosis.pairs
    assert 0 < pair.link.bits_per_s < 115e6  # a busy machine measures less than the limit
    assert [one.level for one in pair.findings if "far below the 10 Gb/s of eth0" in one.text] == ["warning"]
    assert diagnosis.exit_code == 0


def test_a_host_that_is_cut_off_hides_nothing_of_the_others(bed: Bed, patient: Patient) -> None:
    with bed.cut("mac-studio-2"):
        diagnosis = patient()
    assert diagnosis.exit_code == 4
    lost = of(diagnosis, "mac-studio-2")["ssh"]
    assert lost.level == "fault" and lost.hint == "ping 169.254.150.102"
    assert of(diagnosis, "dgx-spark-1")["ssh"].level == "ok"
    broken, whole = diagnosis.pairs
    assert broken.link is None and whole.link.bits_per_s


def test_a_changed_host_key_is_a_fault_that_names_both_keys_and_the_way_out(bed: Bed, patient: Patient) -> None:
    known = bed.home / ".ssh/known_hosts"
    before = known.read_text()
    lines = before.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("169.254.150.103 "))
    other = next(line for line in lines if line.startswith("169.254.150.104 "))
    lines[first] = "169.254.150.103 " + other.split(" ", 1)[1]
    known.write_text("\n".join(lines) + "\n")
    try:
        diagnosis = patient("dgx-spark-1")
    finally:
        known.write_text(before)
    (report,) = diagnosis.hosts
    assert isinstance(report.error, HostKeyRefused) and diagnosis.exit_code == 4
    (finding,) = report.findings
    assert finding.check == "host key" and "has changed" in finding.text
    assert "ssh-keygen -R" in finding.hint and "disagg trust dgx-spark-1" in finding.hint


def test_a_frozen_sshd_is_told_from_a_dead_machine(bed: Bed, patient: Patient) -> None:
    with bed.hosts["dgx-spark-2"].frozen():
        diagnosis = patient("dgx-spark-2")
    (report,) = diagnosis.hosts
    assert isinstance(report.error, HostUnreachable) and "sshd sends nothing" in report.findings[0].text


def test_examining_leaves_nothing_behind(bed: Bed, patient: Patient) -> None:
    def files() -> list[str]:
        homes = [host.home for host in bed.hosts.values()]
        return sorted(str(path) for home in homes for path in home.rglob("*") if "logs" not in path.parts)

    before = files()
    patient()
    assert files() == before
    for host in bed.hosts.values():
        assert not [line for line in host.command_lines() if "DISAGG_PROGRAM" in line]


def test_every_prefill_host_is_paired_with_every_decode_host_of_its_model(patient: Patient) -> None:
    pairs = [(one.name, other.name) for one, other in kv_pairs(patient.fleet)]
    assert pairs == [("dgx-spark-1", "mac-studio-2"), ("dgx-spark-2", "mac-studio-1")]
