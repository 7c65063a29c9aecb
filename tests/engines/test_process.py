"""Priorities of the threads that load a model."""

from __future__ import annotations

import os
import sys
import threading

import psutil
import pytest

from disagg.engines.process import COMPUTE_NICE, LOAD_NICE, low_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")


def nice(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_what_starts_while_a_model_loads_lets_others_go_first_and_computes_as_always_after_it() -> None:
    mine, seen, end = threading.get_native_id(), threading.Event(), threading.Event()
    of_thread: list[int] = []

    def work() -> None:
        of_thread.append(threading.get_native_id())
        seen.set()
        end.wait(60)

    before = nice(mine), psutil.Process().ionice()
    thread = threading.Thread(target=work)
    try:
        with low_priority():
            thread.start()
            assert seen.wait(60)
            during, disk = nice(of_thread[0]), psutil.Process().ionice()
            assert psutil.Process(of_thread[0]).ionice() == disk
        assert disk == (psutil.IOPRIO_CLASS_BE, 7)
        if os.geteuid() == 0:  # else a nice value that was raised could not be lowered
            assert (during, nice(of_thread[0])) == (LOAD_NICE, COMPUTE_NICE)
        assert (nice(mine), psutil.Process().ionice()) == before
        assert psutil.Process(of_thread[0]).ionice()[0] == psutil.IOPRIO_CLASS_NONE
    finally:
        end.set()
        thread.join()
