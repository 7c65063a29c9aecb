"""disagg/engines/vllm/served/engine.py: orders to a `vllm serve`, and what comes of them, without vLLM."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.api.delivery import DESCRIBE, ORDER_FIELD, KVOrder, KVProgress, KVReport, OrderAnswer, ReportHello
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, SendingRun
from disagg.engines.model.reference import Reference
from disagg.engines.sending.runs import AnswerRun
from disagg.engines.vllm.served.engine import ServedEngine, _end_answer
from disagg.errors import Cancelled, ModelError, PeerLost
from disagg.kv.frames import Header
from tests import tiny_models
from tests.deadlines import wait_until
from tests.engines.vllm.served.fake_serve import INFO, FakeServe, completed, serving
from tests.kv.kv_parts import PATIENCE_S

TOKENS = [11, 12, 13]
Answer = tuple[int, bytes]


class Bench:
    """An engine on a FakeServe that describes the tiny model, and answers orders as `taken` says."""

    def __init__(self, model: Path) -> None:
        reference = Reference.open(model, 64)
        layout, fingerprint = reference.layout("float32").to_json(), reference.fingerprint
        self.info = msgspec.structs.replace(INFO, layout=layout, fingerprint=fingerprint.to_json())
        self.path = model
        self.go_on = threading.Event()
        self.taken: Answer = (200, completed(OrderAnswer().to_json()))
        self.fake: FakeServe
        self.engine: ServedEngine

    def answer(self, body: dict[str, Any]) -> Answer:
        if body.get("kv_transfer_params", {}).get(ORDER_FIELD) == DESCRIBE:
            return 200, completed(OrderAnswer(connector=self.info).to_json())
        assert self.go_on.wait(PATIENCE_S)
        return self.taken

    def send(self) -> SendingRun:
        info = self.engine.info
        header = Header("ticket", "r1", info.fingerprint, info.layout, "hash", len(TOKENS))
        deadline = time.monotonic() + PATIENCE_S
        return self.engine.send(TOKENS, ("10.0.0.2", 9001), header, deadline=deadline, next_token=14, salt="")

    def order(self) -> KVOrder:
        """The order that the server has got."""
        wait_until(lambda: len(self.fake.bodies) > 1)
        return KVOrder.from_json(self.fake.bodies[-1]["kv_transfer_params"][ORDER_FIELD])

    def stepped(self, run: SendingRun) -> SendingRun:
        wait_until(lambda: run.step() or run.done)  # type: ignore[func-returns-value]  # None, then the condition
        return run


@pytest.fixture
def bench(tiny: tiny_models.TinyModel, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tiny("llama"))
    with serving(bench.answer) as bench.fake:
        (key := tmp_path / "key").write_text("the-key\n")
        options = EngineOptions("vllm-server", dtype="float32", url=bench.fake.url, key_file=str(key))
        bench.engine = ServedEngine(bench.path, 64, options)
        yield bench
        bench.go_on.set()
        bench.engine.close()


@contextmanager
def worker(order: KVOrder) -> Iterator[socket.socket]:
    """A worker that has announced itself."""
    with socket.create_connection((order.report.host, order.report.port), timeout=PATIENCE_S) as sock:
        sock.sendall(ReportHello(order.id, 1).to_bytes() + b"\n")
        yield sock


def test_a_prompt_is_sent_once_its_worker_has_reported_and_vllm_has_answered(bench: Bench) -> None:
    run, order = bench.send(), bench.order()
    assert (order.ticket, order.next_token, order.deliver.port, order.progress) == ("ticket", 14, 9001, True)
    with worker(order) as sock:
        sock.sendall(KVReport(progress=KVProgress(1, 3, 1.0)).to_bytes() + b"\n")
        wait_until(lambda: run.step() or (run.held == 0 and run._running is not None))  # type: ignore[attr-defined, func-returns-value]  # of ServedPrompt
        bench.go_on.set()
        bench.stepped(run)
        sock.sendall(KVReport(kv_bytes=70).to_bytes() + b"\n")
        assert (run.sent().payload_bytes, run.held, run.timing.tokens) == (70, 1, 2)
    run.close()


def test_a_prompt_whose_worker_dies_fails_before_vllm_answers(bench: Bench) -> None:
    run = bench.send()
    with worker(bench.order()):
        pass
    with pytest.raises(PeerLost):
        bench.stepped(run).sent()
    run.close()


def test_a_prompt_that_is_closed_is_awaited_no_more_and_its_worker_sees_it(bench: Bench) -> None:
    run = bench.send()
    with worker(bench.order()) as sock:
        wait_until(lambda: bool(run._awaited.connections))  # type: ignore[attr-defined]  # of ServedPrompt
        run.close()
        assert sock.recv(1) == b""
    assert bench.engine._reports.outstanding == 0
    with pytest.raises(Cancelled):
        run.sent()


def test_an_engine_whose_server_does_not_listen_any_more_is_not_alive(bench: Bench) -> None:
    assert bench.engine.alive
    bench.taken = 500, b"dying"
    bench.engine._server.listens = lambda: False  # type: ignore[method-assign]  # it has ended
    bench.go_on.set()
    with pytest.raises(ModelError, match="HTTP 500: dying"):
        bench.stepped(bench.send()).sent()
    assert not bench.engine.alive
    assert bench.engine.failure == "vllm serve answered HTTP 500: dying"


def test_an_engine_whose_server_answers_nothing_is_not_alive_and_takes_no_prompt(bench: Bench) -> None:
    bench.fake.healthy = 503
    wait_until(lambda: not bench.engine.alive)
    assert "HTTP 503" in bench.engine.failure
    with pytest.raises(ModelError, match="HTTP 503"):
        bench.send()
    assert bench.engine._reports.outstanding == 0


def test_prompts_are_ordered_with_the_key_of_the_server(bench: Bench) -> None:
    run = bench.send()
    bench.order()
    assert bench.fake.keys["/v1/completions"] == "Bearer the-key"
    run.close()


def test_requests_that_a_server_leaves_unanswered_fail_whoevers_turn_the_step_is(bench: Bench) -> None:
    first, second = bench.send(), bench.engine.start_answer(AnswerRequest(TOKENS, Sampling()), lambda token: None)
    for request in bench.engine._requests.values():
        request.limit_s = -1.0
    first.step()
    with pytest.raises(ModelError, match="no progress"):
        first.sent()
    with pytest.raises(ModelError, match="no progress"):
        second.step()
    first.close()
    second.close()


def test_steps_show_that_vllm_computes_and_the_end_of_a_request_does_not(bench: Bench) -> None:
    run = bench.send()
    with worker(bench.order()) as sock:
        sock.sendall(KVReport(progress=KVProgress(1, 3, 1.0)).to_bytes() + b"\n")
        wait_until(lambda: run.step() or bench.engine._latest > -math.inf)  # type: ignore[func-returns-value]  # None, then the condition
        latest, bench.taken = bench.engine._latest, (500, b"refused")
        bench.go_on.set()
        with pytest.raises(ModelError, match="refused"):
            bench.stepped(run).sent()
    assert bench.engine._latest == latest
    run.close()


def test_an_engine_whose_server_was_replaced_answers_nothing_and_is_not_alive(bench: Bench) -> None:
    bench.go_on.set()
    bench.info = msgspec.structs.replace(bench.info, fingerprint={})
    with pytest.raises(ModelError, match="replaced by a different one"):
        list(bench.engine.generate(TOKENS, Sampling(max_tokens=9)))
    assert not bench.engine.alive and "replaced" in bench.engine.failure


def test_a_prompt_that_cannot_be_ordered_is_not_awaited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("disagg.engines.vllm.served.engine.Call", no_thread)
    with pytest.raises(RuntimeError):
        bench.send()
    assert bench.engine._reports.outstanding == 0 and not bench.engine._requests


def test_an_answer_that_is_complete_is_not_failed_by_the_end_of_its_connection(bench: Bench) -> None:
    run = AnswerRun(bench.engine, 3, lambda token: None, Sampling())
    run.finished = True
    _end_answer(run, ModelError("reset"))
    assert run.done


def test_an_answer_gives_its_tokens_and_one_that_breaks_off_raises_it(bench: Bench) -> None:
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{}]}
    choice = {"token_ids": [7], "logprobs": logprobs, "finish_reason": None}
    lines = [b"data: " + json.dumps({"choices": [{**choice, "finish_reason": end}]}).encode() for end in (None, "stop")]
    bench.go_on.set()
    bench.taken = 200, b"\n\n".join(lines) + b"\n\ndata: [DONE]\n\n"
    tokens = list(bench.engine.generate(TOKENS, Sampling(max_tokens=9)))
    assert [(token.id, token.finish) for token in tokens] == [(7, None), (7, "stop")]
    bench.taken = 200, lines[0] + b"\n\n"
    with pytest.raises(ModelError, match="before the answer was complete"):
        list(bench.engine.generate(TOKENS, Sampling(max_tokens=9)))
