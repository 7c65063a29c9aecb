"""`python -m benchmarks.vllm_bare FOLDER`: vLLM without our connector, in the environment with vLLM.

The same engine arguments as a prefill host's. Reads a JSON array of token ids per line, and prints for each, as a JSON
object, the seconds in which vLLM computed its rows, and the CPU time with that of the one token after them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.config import EngineOptions
from disagg.engines.process import exit_without_cleanup
from disagg.engines.vllm import load
from disagg.engines.vllm.sampling import one_token, parameters

CONTEXT = 4096
STEP_TOKENS = 512
CACHE_BYTES = 256 << 20


def make(folder: Path) -> Any:
    """vLLM's LLMEngine."""
    options = EngineOptions(
        "vllm",
        dtype="float32",
        device="cpu",
        chunk_tokens=STEP_TOKENS,
        kv_cache_memory_bytes=CACHE_BYTES,
        enforce_eager=True,
    )
    load.prepare_environment(options)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**load.arguments(folder, CONTEXT, options)))


_ended: list[float] = []
"""When each forward pass computed the model's last norm, after all keys and values: by time.perf_counter()."""


def watch(worker: Any) -> None:
    """Note the end of each forward pass. worker: vLLM's, in this process."""

    def note(*_: object) -> None:
        _ended.append(time.perf_counter())

    worker.get_model().model.norm.register_forward_hook(note)


def spent(engine: Any, name: str, tokens: Sequence[int]) -> dict[str, float]:
    """Compute one prompt."""
    began, cpu = time.perf_counter(), time.process_time()
    engine.add_request(name, {"prompt_token_ids": list(tokens)}, parameters(one_token(tokens)))
    while engine.has_unfinished_requests():
        engine.step()
    return {"seconds": _ended[-1] - began, "cpu_s": time.process_time() - cpu}


def main() -> None:
    engine = make(Path(sys.argv[1]))
    engine.collective_rpc(watch)
    for number, line in enumerate(sys.stdin):
        sys.stdout.write(json.dumps(spent(engine, str(number), json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
    exit_without_cleanup(0)
