"""disagg/engines/vllm/nodes/parent.py: a worker does not outlive the process that started it."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.fleets import wait_until

WORKER = """
import sys, time
from disagg.engines.vllm.nodes.parent import end_with_parent
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


def test_a_worker_ends_when_its_parent_is_killed_and_not_before() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            worker = psutil.Process(int(parent.stdout.readline()))
            assert not ended(worker)
        finally:
            parent.kill()
    wait_until(lambda: ended(worker), PATIENCE_S, "the worker to end")


def ended(process: psutil.Process) -> bool:
    """Also if nobody has asked for its exit code."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
