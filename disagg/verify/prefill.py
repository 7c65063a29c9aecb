"""`python -m disagg.verify.prefill`: a prefill engine for `disagg verify`, in a process and an environment of its own.

Loads the model, writes a PrefillReady, then answers each PrefillCall that it reads from standard input. It ends with
its input. Whatever else is printed in this process goes to standard error.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO, get_args

import numpy

from disagg import logs
from disagg.api.base import Contract, InvalidValue
from disagg.api.engines import engines_for
from disagg.api.sampling import Sampling
from disagg.api.verify import PrefillCall, PrefillReady, PrefillReply
from disagg.config import DType, EngineOptions
from disagg.engines.base import PrefillEngine
from disagg.engines.model.reference import Reference
from disagg.engines.opening import open_prefill
from disagg.engines.process import exit_without_cleanup
from disagg.errors import DisaggError, ProtocolError
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header
from disagg.servers.host.health import EngineProgress
from disagg.servers.prefill.delivery import delivery_by
from disagg.verify.process import TIMEOUT_S

CACHE_SPARE_BYTES = 64 << 20
"""Of vLLM's paged cache, beside two requests of the whole context: a block of each layer may be partly filled."""


def options_of(arguments: argparse.Namespace, kv_bytes: int) -> EngineOptions:
    """The engine's options: nothing is held between calls. kv_bytes: of a request of the whole context."""
    return EngineOptions(
        arguments.engine,
        dtype=arguments.dtype,
        device=arguments.device,
        quantization=arguments.quantization,
        max_held_bytes=0,
        kv_cache_memory_bytes=2 * kv_bytes + CACHE_SPARE_BYTES,
        enforce_eager=True,
    )


def perform(engine: PrefillEngine, call: PrefillCall) -> PrefillReply:
    """Compute what a call asks for. Raises what the engine and the transfer raise."""
    if call.call == "answer":
        sampling = Sampling(max_tokens=call.count, ignore_eos=True)
        return PrefillReply(tokens=tuple(token.id for token in engine.generate(call.tokens, sampling)))
    if call.call == "logits":
        numpy.save(call.file, engine.logits(call.tokens, call.count, chunk_tokens=call.chunk_tokens))
    else:
        _send(engine, call)
    return PrefillReply()


def _send(engine: PrefillEngine, call: PrefillCall) -> None:
    if call.to is None:
        raise ProtocolError("a call to send KV states no address")
    count, info = len(call.tokens) - 1, engine.info
    header = Header(call.ticket, "verify", info.fingerprint, info.layout, token_hash(call.tokens), count)
    to, deadline = (call.to.host, call.to.port), time.monotonic() + TIMEOUT_S
    progress = EngineProgress()
    engine.on_beat = progress.beat
    delivery = delivery_by(
        engine, call.tokens, to, header, deadline=deadline, salt="verify", beats=lambda: progress.beats
    )
    try:
        run = delivery.start()
        try:
            while not run.done:
                run.step(call.chunk_tokens)
            delivery.finish(run.timing, ())
        finally:
            run.close()
    finally:
        delivery.end()


def serve(engine: PrefillEngine, calls: BinaryIO, replies: BinaryIO) -> None:
    """Answer each call until the input ends. A call that fails is answered with its error."""
    for line in calls:
        try:
            reply = perform(engine, PrefillCall.from_bytes(line))
        except InvalidValue as error:
            reply = PrefillReply(error=ProtocolError(f"not a call: {error}").to_json())
        except DisaggError as error:
            reply = PrefillReply(error=error.to_json())
        _write(replies, reply)


def _write(replies: BinaryIO, value: Contract) -> None:
    replies.write(value.to_bytes() + b"\n")
    replies.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the input ends; 0, or the exit code of the error for which the engine was not loaded."""
    arguments = _parser().parse_args(argv)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # frameworks print
    logs.configure()
    logs.log.setLevel(logging.WARNING)
    try:
        layout = Reference.open(arguments.source, arguments.context).layout(arguments.dtype)
        options = options_of(arguments, layout.nbytes(arguments.context))
        engine = open_prefill(options, arguments.source, arguments.context)
    except DisaggError as error:
        _write(replies, PrefillReady(error=error.to_json()))
        return error.exit_code
    info = engine.info
    ready = PrefillReady(
        backend=info.backend, context=info.profile.context, versions=info.versions, preflight=info.preflight
    )
    _write(replies, ready)
    serve(engine, sys.stdin.buffer, replies)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m disagg.verify.prefill", description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--engine", choices=[one.name for one in engines_for("prefill", loads=True)], required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--dtype", choices=get_args(DType), required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", default=None)
    return parser


if __name__ == "__main__":
    exit_without_cleanup(main())
