from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, time
from disagg.engines.process import exit_without_cleanup
threading.Thread(target=time.sleep, args=(3600,)).start()
print("said")
exit_without_cleanup(7)
"""


def test_exiting_without_cleanup_waits_for_no_thread_and_loses_no_output() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (7, "said\n", "")
