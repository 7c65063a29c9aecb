"""A SendingEngine on vLLM: its scheduler runs in this process and computes several prompts in one step.

In this process, because its steps are then seen: who was computed, for how long, and when one of them hangs. With
several ranks vLLM runs one worker process for each; the KV leaves from there.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import numpy.typing

from disagg.api.delivery import DESCRIBE, ORDER_FIELD
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, Logits, PrefillRun, SendingEngine, SendingRun, Token
from disagg.engines.model.reference import Reference
from disagg.engines.sending.reports import Reports
from disagg.engines.sending.runs import AnswerRun, LogitsRun, NothingToCompute, Run, SentPromptRun
from disagg.engines.vllm import load
from disagg.engines.vllm.nodes import head
from disagg.engines.vllm.sampling import one_token, parameters
from disagg.engines.vllm.scheduler import StepTimes
from disagg.engines.vllm.sharding import Sharding
from disagg.errors import DisaggError, ModelError, first_line
from disagg.kv.frames import Header


class VLLMEngine(SendingEngine):
    """A SendingEngine."""

    together = True

    def __init__(self, source: str | Path, context: int, options: EngineOptions) -> None:
        """Load the model in folder (or hub id) `source` to serve `context` tokens. ModelError if that fails,
        PreflightRefused if vLLM does not compute what the checkpoint describes."""
        load.prepare_environment(options)
        reference = Reference.open(source, context)
        self.tokenizer = reference.tokenizer
        # Before the minutes that loading takes: these may refuse the model.
        sharding = Sharding.of(reference.layout(options.dtype), options.tensor_parallel, options.pipeline_parallel)
        version = load.require_version()
        to_read, patched = load.read(reference, options)
        self._vllm = load.make(reference, context, options, to_read)
        self._running: dict[str, Run] = {}  # by the id that vLLM was given; it makes another one of it, `run.id`
        self._reports = Reports(head(options).address) if options.nnodes > 1 else Reports()
        self._times = StepTimes()
        if options.ranks == 1:  # the only worker is in this process
            load.worker_connector().worker.on_layer = self._beat
        # A step may wait minutes for a worker that has ended.
        self._vllm.engine_core.engine_core.model_executor.register_failure_callback(self._worker_ended)
        from disagg.engines.vllm.profile import measure, weight_bytes

        if any(layer.states for layer in reference.layout(options.dtype).layers):
            self._show_states()
        actual = measure(self._vllm, reference.profile, reference.convolved)
        findings = reference.verdict(actual, patched)
        import torch

        self.info = reference.info(
            actual,
            findings,
            options.dtype,
            backend=f"vllm/{to_read.device}",
            versions={"vllm": version, "torch": str(torch.__version__)},
            memory_bytes=weight_bytes(self._vllm),
            kv_bytes=sharding.kv_bytes(options.kv_cache_memory_bytes),
            weights=reference.weights(options.dtype),
        )

    def _show_states(self) -> None:
        """Compute a prompt of one token, from which the workers see how states lie in the pages. ModelError if they do
        not, or vLLM cannot compute it."""
        tokens = self.tokenizer.encode("a")[-1:]
        run = Run(self, 1)
        try:
            self._add(run, tokens, parameters(one_token(tokens), {ORDER_FIELD: DESCRIBE}), "")
            while not run.finished:
                self.step()
        except Exception as error:  # vLLM raises anything
            raise load.cannot_compute(error) from error
        finally:
            run.close()
        for refusal in self._vllm.collective_rpc(load.refusal_of_states):
            if refusal is not None:
                raise DisaggError.from_json(refusal)

    def warm_up(self) -> None:
        """ModelError for what vLLM can load but not compute."""
        prompt = [0] * min(64, self.info.profile.context - 2)
        try:
            for token in self.generate(prompt, Sampling(max_tokens=2, ignore_eos=True)):
                if not math.isfinite(token.logprob):
                    raise load.cannot_compute(ArithmeticError("its log-probabilities are not numbers"))
            self.info = replace(self.info, evidence=self.evidence())
        except DisaggError:
            raise
        except Exception as error:  # vLLM raises anything
            raise load.cannot_compute(error) from error

    def likeliest(self, tokens: Sequence[int], last: int) -> Sequence[int]:
        """Each is the answer to a request of its own: all log-probabilities of a large vocabulary
        take vLLM seconds."""
        one, ends = Sampling(max_tokens=1, ignore_eos=True), range(len(tokens) - last + 1, len(tokens) + 1)
        return [token.id for end in ends for token in self.generate(tokens[:end], one)]

    def send(
        self, tokens: Sequence[int], to: tuple[str, int], header: Header, *, deadline: float, next_token: int, salt: str
    ) -> SendingRun:
        if header.start >= len(tokens):
            return NothingToCompute(to, header, deadline)
        with self._reports.expecting() as awaited:
            order = self._reports.order(awaited, to, header, deadline=deadline, next_token=next_token)
            run = SentPromptRun(self, len(tokens), awaited, self._reports, deadline)
            self._add(run, tokens, parameters(one_token(tokens), {ORDER_FIELD: order}), salt)
        return run

    def start_answer(self, request: AnswerRequest, emit: Callable[[Token], None]) -> PrefillRun:
        """Draws are vLLM's own: with a seed they are repeatable here, and differ from other
        engines'. RequestError or CapabilityMissing for what vLLM's sampling does not have."""
        run = AnswerRun(self, len(request.tokens), emit, request.sampling)
        self._add(run, request.tokens, parameters(request, eos_ids=self.info.eos_ids), request.salt)
        return run

    def logits(self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None) -> Logits:
        """Log-probabilities: logits less a constant for each token. vLLM has them for tokens that it
        generates, so each of the last tokens ends a request of its own. These share the blocks that vLLM caches."""
        head, salt = len(tokens) - last, secrets.token_hex(8)
        for end in range(chunk_tokens or head, head, chunk_tokens or 1):
            self._run_to_end([LogitsRun(self, tokens[:end])], salt)
        runs = [LogitsRun(self, tokens[: head + n + 1]) for n in range(last)]
        self._run_to_end(runs[:1], salt)
        self._run_to_end(runs[1:], salt)
        return numpy.stack([run.row for run in runs])

    def _run_to_end(self, runs: Sequence[LogitsRun], salt: str) -> None:
        try:
            for run in runs:
                self._add(run, run.tokens, parameters(one_token(run.tokens), all_logprobs=True), salt)
            while not all(run.finished for run in runs):
                self.step()
        finally:
            for run in runs:
                run.close()

    def step(self) -> None:
        """Compute one step for all open runs, and pass each its output. Raises ModelError if vLLM has failed."""
        if self._failure is not None:
            raise self._failure
        began = time.monotonic()
        try:
            outputs = self._vllm.step()
        except Exception as error:  # whatever it is, its engine is not used again
            failed = ModelError(f"vLLM has failed: {first_line(error)}", "see the traceback in the server's log")
            self._failure = self._failure or failed
            raise
        ended = time.monotonic()
        self._note_steps(began, ended)
        for output in outputs:
            if output.request_id in self._running:
                self._running[output.request_id].take(output, began, ended)

    def drop(self, run: Run) -> None:
        """Forget a run; vLLM aborts it if it has not finished."""
        if self._running.pop(run.name, None) is not None and self._failure is None and not run.finished:
            self._vllm.abort_request([run.id], internal=True)
            if not self._running:
                self.step()  # the workers receive an abort with the next step

    def close(self) -> None:
        self._reports.close()
        self._vllm.engine_core.shutdown()

    def _worker_ended(self) -> None:
        """A worker has ended: vLLM ends the others. Called on its thread that watches them."""
        hint = "see the server's log; the server ends itself, and its service manager starts it again"
        self._failure = ModelError("a worker process of vLLM has ended", hint)

    def _beat(self) -> None:
        self.on_beat()

    def _add(self, run: Run, tokens: Sequence[int], params: Any, salt: str) -> None:
        if self._failure is not None:
            raise self._failure
        prompt: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt:
            prompt["cache_salt"] = salt
        run.id = self._vllm.add_request(run.name, prompt, params)
        self._running[run.name] = run

    def _note_steps(self, began: float, ended: float) -> None:
        """Pass each run its share of the steps that ended in a call of vLLM. In a pipeline a call plans one step, and
        ends none or an earlier one."""
        core = self._vllm.engine_core.engine_core
        planned = core.scheduler.connector.scheduler.planned
        while planned:
            self._times.plan(began, planned.popleft())
        for step in self._times.end(ended, len(core.batch_queue or ())):
            for run in self._running.values():
                if (share := step.shares.get(run.id)) is not None:
                    run.note(step.began, step.ended, share)
