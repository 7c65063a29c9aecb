"""disagg/engines/sending/runs.py and engine.py: one request's failure is its own, whoever's turn the step was."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disagg.api.delivery import KVProgress
from disagg.api.layout import LayerLayout
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import Token
from disagg.engines.model.architectures.base import ReadByVLLM
from disagg.engines.model.profile import LayerProfile, ModelProfile
from disagg.engines.model.reference import Reference
from disagg.engines.model.text import HFTokenizer
from disagg.engines.sending.reports import Reports
from disagg.engines.sending.runs import AnswerRun, SentPromptRun
from disagg.engines.vllm import load, profile
from disagg.engines.vllm.engine import VLLMEngine
from disagg.engines.vllm.scheduler import StepTimes
from disagg.errors import Cancelled, DisaggError, ModelError, RequestError
from disagg.kv.frames import Header
from tests.kv.kv_parts import FINGERPRINT, PATIENCE_S, mixed_layout


@pytest.fixture
def reports() -> Iterator[Reports]:
    with closing(Reports()) as reports:
        yield reports


class FakeVLLM:
    """A vLLM whose next step has these outputs. planned: shares of its steps, not yet taken."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.aborted: list[str] = []
        self.planned = deque[dict[str, KVProgress]]()
        self.under_way: list[None] = []  # in a pipeline
        connector = SimpleNamespace(scheduler=SimpleNamespace(planned=self.planned))
        core = SimpleNamespace(scheduler=SimpleNamespace(connector=connector), batch_queue=self.under_way)
        self.engine_core = SimpleNamespace(engine_core=core)

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        return name

    def step(self) -> list[Any]:
        return self.outputs

    def abort_request(self, ids: list[str], *, internal: bool) -> None:
        self.aborted += ids
        self.outputs = []


def engine_on(vllm: FakeVLLM, reports: Reports) -> VLLMEngine:
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._vllm, engine._reports, engine._running, engine._failure = vllm, reports, {}, None
    engine._times = StepTimes()
    return engine


def output(run: AnswerRun | SentPromptRun, reason: str | None, *ids: int) -> Any:
    """What vLLM has for a request after a step."""
    answer = SimpleNamespace(
        finish_reason=reason, token_ids=ids, logprobs=[{id: SimpleNamespace(logprob=-1.0)} for id in ids]
    )
    return SimpleNamespace(request_id=run.name, finished=reason is not None, outputs=[answer])


def answer_of(engine: VLLMEngine, emit: Any) -> AnswerRun:
    run = AnswerRun(engine, 3, emit, Sampling())
    engine._add(run, [1, 2, 3], None, "")
    return run


def test_an_answer_that_vllm_ends_with_an_error_raises_it_itself_and_the_others_get_their_tokens(
    reports: Reports,
) -> None:
    vllm, emitted = FakeVLLM(), list[Token]()
    engine = engine_on(vllm, reports)
    failed, other = answer_of(engine, emitted.append), answer_of(engine, emitted.append)
    vllm.outputs = [output(failed, "error"), output(other, "length", 7)]
    other.step()
    assert ([token.id for token in emitted], other.done, failed.done) == ([7], True, False)
    with pytest.raises(DisaggError, match="vLLM ended the request with 'error'"):
        failed.step()
    failed.close()
    assert vllm.aborted == []


def test_an_answer_whose_listener_fails_raises_that_itself_and_is_aborted(reports: Reports) -> None:
    vllm = FakeVLLM()
    engine = engine_on(vllm, reports)

    def emit(token: Token) -> None:
        raise ValueError("a defect")

    failed, other = answer_of(engine, emit), answer_of(engine, lambda token: None)
    vllm.outputs = [output(failed, None, 7), output(other, None, 7)]
    other.step()
    with pytest.raises(ValueError, match="a defect"):
        failed.step()
    failed.close()
    assert vllm.aborted == [failed.id]


def test_a_step_of_a_pipeline_counts_when_it_has_ended_and_not_when_it_is_planned(reports: Reports) -> None:
    vllm = FakeVLLM()
    engine = engine_on(vllm, reports)
    run = SentPromptRun(engine, 10, reports.expect("an id of sixteen"), reports, deadline=float("inf"))
    engine._add(run, list(range(10)), None, "")
    vllm.planned.append({run.id: KVProgress(0, 6, 1.0)})
    vllm.under_way.append(None)
    run.step()
    assert run.remaining == 10
    vllm.planned.append({run.id: KVProgress(6, 10, 1.0)})
    run.step()
    assert run.remaining == 4
    vllm.under_way.clear()
    run.step()
    assert run.remaining == 0


def test_a_prompt_that_vllm_gives_up_before_its_first_step_fails_at_once(reports: Reports) -> None:
    vllm = FakeVLLM()
    engine = engine_on(vllm, reports)
    run = SentPromptRun(engine, 3, reports.expect("an id of sixteen"), reports, deadline=float("inf"))
    engine._add(run, [1, 2, 3], None, "")
    vllm.outputs = [output(run, "abort")]
    run.step()
    assert run.done
    with pytest.raises(DisaggError, match="vLLM ended the request with 'abort'"):
        run._awaited.done.result(0)


def test_a_prompt_is_not_awaited_any_more_if_vllm_fails_while_it_is_closed(reports: Reports) -> None:
    vllm = FakeVLLM()
    engine = engine_on(vllm, reports)
    run = SentPromptRun(engine, 3, reports.expect("an id of sixteen"), reports, deadline=0.0)
    engine._add(run, [1, 2, 3], None, "")
    engine._failure = None
    vllm.step = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]  # raises
    with pytest.raises(ZeroDivisionError):
        run.close()
    assert reports.outstanding == 0
    with pytest.raises(Cancelled):
        run._awaited.done.result(PATIENCE_S)
    with pytest.raises(ModelError, match="vLLM has failed"):
        engine.step()


def test_an_order_that_vllm_refuses_is_not_awaited(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RequestError("no such sampling")

    monkeypatch.setattr("disagg.engines.vllm.engine.parameters", refuse)
    header = Header("ticket", "r1", FINGERPRINT, mixed_layout(), "hash", 3, 0)
    with pytest.raises(RequestError):
        engine_on(FakeVLLM(), reports).send(
            [1, 2, 3], ("127.0.0.1", 1), header, deadline=PATIENCE_S, next_token=4, salt=""
        )
    assert reports.outstanding == 0


def test_an_engine_states_its_kv_memory_without_the_copies_that_ranks_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of four ranks of a model with two heads, two have the same."""
    (tmp_path / "config.json").write_text("{}")
    layer = LayerProfile(LayerLayout("full", 2, 4, 4), None)
    described = ModelProfile("checkpoint", "llama", 9, 512, (layer,), "", "", "", frozenset())
    config = SimpleNamespace(model_type="llama", num_hidden_layers=1, hidden_size=8)
    reference = Reference(tmp_path, {}, config, cast(HFTokenizer, None), described)
    executor = SimpleNamespace(register_failure_callback=lambda ended: None)
    vllm = SimpleNamespace(
        vllm_config=SimpleNamespace(device_config=SimpleNamespace(device_type="cpu")),
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor)),
    )
    monkeypatch.setattr(Reference, "open", lambda source, context: reference)
    monkeypatch.setattr(load, "prepare_environment", lambda options: None)
    monkeypatch.setattr(load, "require_version", lambda: "0.32.0")
    monkeypatch.setattr(load, "read", lambda reference, options: (ReadByVLLM(config, "cpu"), []))
    monkeypatch.setattr(load, "make", lambda path, context, options, to_read: vllm)
    monkeypatch.setattr(profile, "measure", lambda engine, reference, _: replace(reference, source="vllm"))
    monkeypatch.setattr(profile, "weight_bytes", lambda engine: 0)
    options = EngineOptions("vllm", device="cpu", tensor_parallel=4, kv_cache_memory_bytes=100)
    with monkeypatch.context() as while_made:
        while_made.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.9.0"))  # whose import takes seconds
        engine = VLLMEngine(str(tmp_path), 512, options)
    with closing(engine._reports):
        assert (options.prompts_kv_bytes, engine.info.kv_bytes) == (400, 200)


def test_a_model_of_which_vllm_computes_no_numbers_is_refused(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = engine_on(FakeVLLM(), reports)
    engine.info = SimpleNamespace(profile=SimpleNamespace(context=512))
    monkeypatch.setattr(engine, "generate", lambda tokens, sampling: iter([Token(3, float("nan"))]))
    with pytest.raises(ModelError, match="cannot compute this model: ArithmeticError: its log-probabilities are not"):
        engine.warm_up()


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (RuntimeError("CUDA out of memory."), "has too little memory", "lower kv_cache_memory_bytes"),
        (RuntimeError("Worker failed with error 'CUDA out of memory'"), "has too little memory", "lower kv_cache"),
        (MemoryError(), "has too little memory", "lower kv_cache_memory_bytes"),
        (RuntimeError("illegal memory access"), "cannot compute this model: RuntimeError: illegal", "use the engine"),
        (AssertionError(), "cannot compute this model: AssertionError", "use the engine transformers"),
    ],
)
@pytest.mark.parametrize("place", ["generate", "evidence"])
def test_a_failure_of_the_first_prompts_has_the_hint_for_memory_or_that_for_the_model(
    reports: Reports, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception, message: str, hint: str
) -> None:
    def fail(*args: Any) -> Any:
        raise error

    engine: Any = engine_on(FakeVLLM(), reports)
    engine.info = SimpleNamespace(profile=SimpleNamespace(context=512))
    monkeypatch.setattr(engine, "generate", lambda tokens, sampling: iter(()))
    monkeypatch.setattr(engine, place, fail)
    with pytest.raises(ModelError, match=message) as failed:
        engine.warm_up()
    assert failed.value.hint.startswith(hint)
