"""disagg/engines/vllm/served/watch.py: a server is left if it does not answer, and not if it is late now and then."""

from __future__ import annotations

import queue
import threading

from disagg.engines.vllm.served.watch import FAILURES, Pulse
from disagg.errors import DisaggError, ModelError
from tests.kv.kv_parts import PATIENCE_S


class Script:
    """What a server answers to each question; to all later ones nothing is answered. asked: how often it was."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.limits: set[float] = set()
        self.ended: queue.Queue[DisaggError] = queue.Queue()

    def ask(self, limit_s: float) -> None:
        self.limits.add(limit_s)
        self.asked += 1
        if not (self.answers.pop(0) if self.answers else False):
            raise ModelError(f"question {self.asked} is not answered", "")


def test_a_server_is_left_after_failures_in_a_row_and_asked_no_more() -> None:
    script = Script(True, False, True, True)
    Pulse(script.ask, script.ended.put, every_s=0.0, limit_s=3.0)
    error = script.ended.get(timeout=PATIENCE_S)
    assert error.message == f"question {4 + FAILURES} is not answered"
    assert (script.asked, script.limits) == (4 + FAILURES, {3.0})


def test_a_pulse_that_is_closed_reports_nothing() -> None:
    script, asked, go_on = Script(), threading.Event(), threading.Event()

    def ask(limit_s: float) -> None:
        if script.asked == FAILURES - 1:  # the last one before the server is left
            asked.set()
            assert go_on.wait(PATIENCE_S)
        script.ask(limit_s)

    pulse = Pulse(ask, script.ended.put, every_s=0.0)
    assert asked.wait(PATIENCE_S)
    pulse.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "vllm-pulse":
            thread.join(PATIENCE_S)
    assert (script.asked, script.ended.empty()) == (FAILURES, True)
