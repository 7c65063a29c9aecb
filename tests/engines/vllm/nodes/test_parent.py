"""disagg/engines/vllm/nodes/parent.py: a worker does not outlive the process that started it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import psutil

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
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.is_running() and parent.poll() is None
    finally:
        parent.kill()
        parent.wait()
    with suppress(psutil.NoSuchProcess):
        worker.wait(PATIENCE_S)
