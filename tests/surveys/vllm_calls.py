"""What tests/surveys/vllm_prefill.py asks of vLLM.

    .venv-vllm/bin/python -m tests.surveys.vllm_calls MODEL CALLS REPLIES RANKS DTYPE

Loads the model in the folder MODEL with the engine `vllm`, writes a PrefillReady to the file REPLIES, then a
PrefillReply for each PrefillCall in CALLS, each as one line of JSON. Prompts are computed in steps of 96 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from disagg.api.verify import PrefillReady
from disagg.config import DType, EngineOptions
from disagg.engines.process import exit_without_cleanup
from disagg.engines.vllm.engine import VLLMEngine
from disagg.errors import DisaggError
from disagg.verify.prefill import serve

CONTEXT = 2048
OPTIONS = EngineOptions(
    "vllm",
    device="cpu",
    chunk_tokens=96,
    threads=1,
    kv_cache_memory_bytes=256 << 20,
    enforce_eager=True,
)


def main(arguments: Sequence[str]) -> int:
    """0, or the exit code of the error for which the model is not served."""
    model, calls, replies = map(Path, arguments[:3])
    options = replace(OPTIONS, tensor_parallel=int(arguments[3]), dtype=cast(DType, arguments[4]))
    with replies.open("wb") as answers, calls.open("rb") as lines:
        try:
            engine = VLLMEngine(model, CONTEXT, options)
            engine.warm_up()
        except DisaggError as error:
            answers.write(PrefillReady(error=error.to_json()).to_bytes() + b"\n")
            return error.exit_code
        answers.write(PrefillReady(backend=engine.info.backend, context=CONTEXT).to_bytes() + b"\n")
        serve(engine, lines, answers)
    return 0


if __name__ == "__main__":
    exit_without_cleanup(main(sys.argv[1:]))
