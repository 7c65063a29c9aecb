"""disagg/engines/vllm/nodes.py: a worker does not outlive the process that started it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from disagg.engines.vllm.nodes import _parent as parent_of_this_process
from tests.deadlines import wait_until

WORKER = """
import sys, time
from disagg.engines.vllm.nodes import end_with_parent
end_with_parent(0.01)
print("ready", flush=True)
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
worker.wait()
"""
PATIENCE_S = 300.0


def test_a_worker_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            worker = psutil.Process(int(parent.stdout.readline()))
            assert not ended(worker)
        finally:
            parent.kill()
    try:
        wait_until(lambda: ended(worker), PATIENCE_S, "the worker to end")
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def test_a_worker_whose_parent_has_ended_before_is_distinguished_from_one_of_the_process_that_adopted_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=4711))
    assert parent_of_this_process() == 4711
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    assert parent_of_this_process() == os.getppid()


def ended(process: psutil.Process) -> bool:
    """Also if nobody has asked for its exit code."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
