"""vLLM's own processes, without the 13 s of CPU time in which each of them would import vLLM again.

On a CPU vLLM has its engine and its workers spawned: a new interpreter is given a command to run. Here a fork
of the process that starts them runs that command.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from multiprocessing import util
from typing import Any

_SPAWN = "multiprocessing.spawn"
_spawn: Callable[..., int] = vars(util)["spawnv_passfds"]


def import_vllm_once() -> None:
    """From now on, in this process and in its forks."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    configure_logging_if_needed(LoggingConfig())
    current_platform.register_triton_kernel_overrides()  # looks at every name in every module
    current_platform.register_triton_kernel_overrides = lambda: None
    # It finds the memory of the title now, which it cannot once a fork has another environment.
    importlib.import_module("setproctitle").getproctitle()
    vars(util)["spawnv_passfds"] = _fork
    registry._run_in_subprocess = lambda function: function()  # the process is for what may not touch CUDA here


def _fork(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """As multiprocessing's function of this place: start `python -c COMMAND ...` with these descriptors open."""
    command = arguments[arguments.index("-c") + 1]
    if _SPAWN not in command:
        return _spawn(path, arguments, descriptors)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        gc.freeze()  # what owns a descriptor that is closed here must not close it again
        _close_all_but({0, 1, 2, *descriptors})
        _reset_signals()
        sys.argv = ["-c", *arguments[arguments.index("-c") + 2 :]]
        exec(command, {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _close_all_but(kept: Iterable[int]) -> None:
    for below, above in pairwise([*sorted(kept), 1 << 20]):
        os.closerange(below + 1, above)


def _reset_signals() -> None:
    """As in a new interpreter."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
