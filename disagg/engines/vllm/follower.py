"""A node of vLLM that is not the head: its workers, and a server that is asked for nothing but its health."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, Logits, PrefillRun, SendingEngine, SendingRun, Token
from disagg.engines.model.reference import Reference
from disagg.engines.sending.runs import EmptyRun
from disagg.engines.vllm import load
from disagg.engines.vllm.nodes import Endpoint, head
from disagg.engines.vllm.sharding import Sharding
from disagg.errors import ModelError
from disagg.kv.frames import Header

CONNECT_S: Final = 10.0
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds without data until the kernel sends a probe (macOS has another name for it), seconds between two probes, and
their number. A head whose machine has lost its power ends no connection."""


class VLLMFollower(SendingEngine):
    """The workers of a node that is not the head. It is asked for nothing; it is alive as long as they and the head
    are."""

    together = True

    def __init__(self, source: str | Path, context: int, options: EngineOptions) -> None:
        """Load this node's part of the model, once the head does so too. ModelError if that fails."""
        load.prepare_environment(options)
        reference = Reference.open(source, context)
        self.tokenizer = reference.tokenizer
        Sharding.of(reference.layout(options.dtype), options.tensor_parallel, options.pipeline_parallel)
        version = load.require_version()
        to_read, _ = load.read(reference, options)
        self._executor = load.make_workers(reference, context, options, to_read)
        self._executor.register_failure_callback(lambda: self._end("a worker process of vLLM has ended"))
        self._head = _connected(head(options))
        threading.Thread(target=self._watch_head, name="vllm-head", daemon=True).start()
        import torch

        self.info = reference.info(
            reference.profile,
            (),
            options.dtype,
            backend=f"vllm/{to_read.device}",
            versions={"vllm": version, "torch": str(torch.__version__)},
        )

    def warm_up(self) -> None:
        """The head's is that of all nodes."""

    def probe(self) -> PrefillRun:
        """Nothing: the head tests all nodes."""
        if self._failure is not None:
            raise self._failure
        return EmptyRun()

    def send(
        self, tokens: Sequence[int], to: tuple[str, int], header: Header, *, deadline: float, next_token: int, salt: str
    ) -> SendingRun:
        raise _follows()

    def start_answer(self, request: AnswerRequest, emit: Callable[[Token], None]) -> PrefillRun:
        raise _follows()

    def logits(self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None) -> Logits:
        raise _follows()

    def close(self) -> None:
        self._failure = self._failure or ModelError("the engine is closed")
        self._head.close()
        self._executor.shutdown()

    def _watch_head(self) -> None:
        """End with the connection to the head: vLLM's workers would wait for a head that has ended."""
        try:
            while self._head.recv(1):
                pass
        except OSError:
            pass
        self._end("the head of the nodes has ended")

    def _end(self, why: str) -> None:
        self._failure = self._failure or ModelError(why, "the server ends itself, and its service manager starts it")


def _follows() -> ModelError:
    return ModelError("this host computes a part of what another one is asked for", "ask the host of node_rank 0")


def _connected(to: Endpoint) -> socket.socket:
    """A connection to the head's meeting point, which ends with the head or its machine. Nothing is sent on it."""
    try:
        sock = socket.create_connection(to, timeout=CONNECT_S)
    except OSError as error:
        raise ModelError(f"the head of the nodes at {to.address} has gone: {error}", "see its log") from error
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock
