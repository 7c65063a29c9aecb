"""benchmarks/peers/transport.py: who runs, who is skipped by name, and what the figures say. Nothing is timed."""

from __future__ import annotations

import pytest

from benchmarks.peers import iperf, transport
from benchmarks.peers.installed import import_error, package
from benchmarks.peers.pair import TimedTransfer, TransferFailed
from benchmarks.peers.transport import OURS, Peer


def transfers(*seconds: float) -> list[TimedTransfer]:
    return [TimedTransfer(1_000_000_000, each, 0.5, 0.25) for each in seconds]


def peer(name: str, seconds: float, why: str | None = None) -> Peer:
    return Peer(
        name, {"push": lambda tokens: transfers(seconds)[0]}, lambda: f"{name} 1", lambda: why, f"install {name}"
    )


def test_a_peer_that_is_absent_is_skipped_by_name_with_the_command_that_installs_it() -> None:
    result = transport.compare([peer("there", 1.0), peer("gone", 1.0, "No module named 'gone'")], 2048, 2)
    assert result["skipped"] == {"gone": {"why": "No module named 'gone'", "install": "install gone"}}
    assert list(result["peers"]) == ["there"]
    assert result["peers"]["there"]["version"] == "there 1"


def test_the_ratio_is_ours_over_the_peer_and_is_left_out_without_ours() -> None:
    both = transport.compare([peer(OURS, 1.0), peer("half", 2.0)], 2048, 1)["peers"]
    assert both["half"]["ratio"] == pytest.approx(2.0)
    assert "ratio" not in both[OURS]
    assert "ratio" not in transport.compare([peer("half", 2.0)], 2048, 1)["peers"]["half"]


def test_a_peer_counts_by_the_median_of_its_best_way() -> None:
    summary = transport.summary({"read": transfers(1.0, 2.0, 4.0), "write": transfers(0.1, 4.0, 5.0)})
    assert summary["way"] == "read"
    assert summary["gb_s"] == pytest.approx(0.5)
    assert summary["best_gb_s"] == pytest.approx(1.0)
    assert summary["ways"]["write"]["gb_s"] == pytest.approx(0.25)
    assert summary["sender_cpu_s_per_gb"] == pytest.approx(0.5)


def test_a_way_that_fails_is_reported_and_not_tried_again_while_the_others_go_on() -> None:
    tried: list[int] = []

    def broken(tokens: int) -> TimedTransfer:
        tried.append(tokens)
        raise TransferFailed("the bytes in place are not the bytes sent")

    bad = Peer("bad", {"write": broken}, lambda: "bad 1")
    result = transport.compare([bad, peer("good", 1.0)], 2048, 3)
    assert result["failed"] == {"bad write": "the bytes in place are not the bytes sent"}
    assert tried == [2048]
    assert len(result["peers"]["good"]["rates"]) == 3
    assert "bad" not in result["peers"]


def test_every_round_begins_with_another_peer() -> None:
    order: list[str] = []

    def way(name: str) -> Peer:
        def run(tokens: int) -> TimedTransfer:
            order.append(name)
            return transfers(1.0)[0]

        return Peer(name, {"push": run}, lambda: name)

    transport.compare([way("a"), way("b"), way("c")], 2048, 3)
    assert "".join(order) == "abcbcacab"


def test_each_peer_has_the_command_that_installs_it() -> None:
    for each in transport.PEERS[2:]:
        assert "install" in each.install


def test_a_module_that_cannot_be_imported_has_a_reason() -> None:
    assert import_error("json") is None
    assert import_error("no_such_module_here") == "ModuleNotFoundError: No module named 'no_such_module_here'"


def test_a_package_is_the_first_that_is_installed() -> None:
    assert package("no-such-package-here", "pytest") == f"pytest {pytest.__version__}"
    assert package("no-such-package-here") == "unknown"


def test_iperf3_keeps_its_rate_where_it_counted_other_bytes() -> None:
    end = {
        "sum_received": {"bits_per_second": 16e9, "bytes": 990},
        "cpu_utilization_percent": {"host_total": 50.0, "remote_total": 25.0},
    }
    transfer = iperf.parse({"end": end}, 1_000_000_000)
    assert (transfer.seconds, transfer.sender_cpu_s, transfer.receiver_cpu_s) == pytest.approx((0.5, 0.25, 0.125))


def test_an_error_of_iperf3_is_its_failure() -> None:
    with pytest.raises(TransferFailed, match="unable to connect"):
        iperf.parse({"error": "unable to connect to server"}, 1)
