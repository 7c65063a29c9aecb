"""What came of asking a server -> its state, as a table: no server is asked."""

from __future__ import annotations

import errno
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import DisaggError, FleetError, ModelError
from disagg.fleet.lifecycle.status.http_get import ReplyTimeout
from disagg.fleet.lifecycle.status.judge import Asked, judge
from tests.fleet.facts.fixture_facts import spark

LOCAL = {"connector": "local", "service": "process"}


@dataclass
class Known:
    """What this machine knows beside the answer."""

    process: tuple[int, bool, str] | None = None
    failed_start: DisaggError | None = None
    stop_other: str = ""
    holder: str = ": a program"
    on_mac: bool = False
    log: str = "/state/a.log"
    missing_token: str = "disagg start"
    token_file: Path = Path("/state/token")


@pytest.mark.parametrize(
    ("host", "asked", "known", "state", "why"),
    [
        (LOCAL, {"error": ConnectionRefusedError()}, {"process": (7, True, "")}, "loading", "process 7 runs but"),
        (LOCAL, {"error": ReplyTimeout()}, {"process": (7, True, "")}, "silent", "process 7 runs but did not answer"),
        (
            LOCAL,
            {"error": ConnectionRefusedError()},
            {"process": (7, False, "no room")},
            "failed",
            "ended: no room",
        ),
        (LOCAL, {"error": ConnectionRefusedError()}, {"process": (7, False, "")}, "failed", "was killed: no reason in"),
        (LOCAL, {"error": ConnectionRefusedError()}, {}, "not running", "nothing listens on"),
        (
            LOCAL,
            {"error": ConnectionRefusedError()},
            {"failed_start": ModelError("no weights", "fetch them")},
            "failed",
            "it did not start: no weights",
        ),
        (LOCAL, {"error": ReplyTimeout()}, {}, "foreign", "did not answer within 3 s: a program"),
        ({}, {"error": ReplyTimeout()}, {"holder": ""}, "silent", "accepts connections, but did not answer within 3 s"),
        ({}, {"error": TimeoutError()}, {}, "unreachable", "did not answer within 3 s"),
        ({}, {"error": OSError(errno.EHOSTUNREACH, "no route")}, {}, "unreachable", "no route"),
        ({}, {"error": ssl.SSLCertVerificationError()}, {}, "unauthorised", "does not prove that it has the token"),
        ({}, {"error": ssl.SSLError()}, {}, "foreign", "answers without the fleet's TLS"),
        ({}, {"code": 200, "answer": {"pong": 1}}, {}, "foreign", "answers, but not as a disagg server"),
        ({}, {"code": 401}, {}, "unauthorised", "does not accept the token in /state/token, and reports nothing"),
        (
            {},
            {"shown": False, "code": 200, "answer": {"status": "ok"}},
            {},
            "unauthorised",
            "there is no fleet token",
        ),
    ],
)
def test_the_state_follows_from_the_answer_and_what_is_known_here(
    host: dict[str, Any], asked: dict[str, Any], known: dict[str, Any], state: str, why: str
) -> None:
    status = judge(Asked(spark(**host), 3.0, **{"shown": True, **asked}), Known(**known))
    assert (status.state, why in status.why) == (state, True), status.why


def test_only_a_mac_may_be_told_to_allow_the_local_network() -> None:
    asked = Asked(spark(), 3.0, True, error=OSError(errno.EHOSTUNREACH, "no route"))
    assert "Local Network" in judge(asked, Known(on_mac=True)).hint
    assert judge(asked, Known()).hint.startswith("ping ")


def test_a_damaged_record_is_its_hosts_state_and_nobody_elses() -> None:
    class Damaged(Known):
        @property
        def process(self) -> tuple[int, bool, str] | None:
            raise FleetError("x.pid is damaged", "rm x.pid")

        @process.setter
        def process(self, value: object) -> None: ...

    status = judge(Asked(spark(**LOCAL), 3.0, True, error=ConnectionRefusedError()), Damaged())
    assert (status.state, status.why, status.hint) == ("failed", "x.pid is damaged", "rm x.pid")
