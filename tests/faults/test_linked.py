"""Every request ends when a cable is cut: cells of the matrix that need servers in networks of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import linked
from tests.faults.cells import REPRESENTATIVE_LINKED, cells
from tests.faults.linked import LinkedFleet
from tests.faults.matrix import SAMPLINGS, Matrix
from tests.faults.report import line
from tests.testbed import network

CELLS = {cell.id: cell for cell in cells()}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    from tests import tiny_models

    if not network.may_make_namespaces():
        pytest.skip("needs network namespaces: run as root")
    folder = tmp_path_factory.mktemp("linked")
    with linked.running(folder, tiny_models.make("qwen3", folder / "model"), clocks=False) as fleet:
        yield Matrix(fleet)


@pytest.mark.parametrize(("number", "name"), list(enumerate(REPRESENTATIVE_LINKED)), ids=str)
def test_a_request_ends_as_the_matrix_states_it_on_real_links(matrix: Matrix, number: int, name: str) -> None:
    result = matrix.run(CELLS[name], list(SAMPLINGS)[number % 2])
    assert result.problems == [], line(result)


def test_a_cut_of_some_seconds_does_not_end_in_a_later_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, ...]] = []
    monkeypatch.setattr(network, "in_network", lambda hub, *command: done.append(command))
    fleet = LinkedFleet(Path("hosts.toml"), {}, {}, {}, hub=None, clocks={})  # type: ignore[arg-type]  # has no network
    before = threading.active_count()
    fleet.cut_link("decode-1", 60.0)
    assert threading.active_count() == before + 1
    fleet.heal()
    assert threading.active_count() == before
    assert done == [("ip", "link", "set", "decode-1", "down")]
