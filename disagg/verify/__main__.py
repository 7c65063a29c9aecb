"""`python -m disagg.verify`: compare a hand-off of a model with each engine alone. Prints a VerifyReport as JSON.

Loads the model in a prefill engine, which has a process of its own, and in mlx-lm, and answers one prompt three times:
after a hand-off over TCP, with the prefill engine alone, and with mlx-lm alone. Then teacher-forces one answer through
all three and compares the logits. As a control, another prompt's KV must change the answer; otherwise the comparison
shows nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from disagg import logs
from disagg.api.engines import engines_for
from disagg.api.names import AS_IS
from disagg.api.sampling import Sampling
from disagg.api.verify import BackendFinding, SplitComparison, VerifyBounds, VerifyReport
from disagg.config import DType, EngineOptions
from disagg.engines.base import audit
from disagg.engines.base.audit import UNBOUNDED
from disagg.engines.model.reference import Reference
from disagg.engines.process import exit_without_cleanup
from disagg.errors import ContextLengthExceeded, DisaggError
from disagg.kv.received import ReceivedKV
from disagg.verify.compare import (
    Answer,
    Comparisons,
    EngineRun,
    Runs,
    bounds,
    bounds_alone,
    compare_split,
    split_layers,
    summary,
)
from disagg.verify.pair import EnginePair
from disagg.verify.prefill import ALTERNATIVES, PrefillSpec

PREFILL_ENGINES: Final = [one.name for one in engines_for("prefill", loads=True)]
AnswersAlone = tuple[Sequence[Answer], Sequence[Answer]]
"""The answers of the prefill and of the decode engine alone, for each prompt."""
DECODE_ENGINE: Final = engines_for("decode", loads=True)[0].name


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """What is compared. weights: the form of the prefill engine's and of the decode engine's. chunk: tokens per prefill
    chunk of the hand-off."""

    dtype: DType
    weights: tuple[str, str]
    prompt_tokens: int
    max_tokens: int
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Controls:
    """computed: prompt tokens that the decode engine computed after the hand-off. wrong_kv_changes, deviation: as in
    VerifyReport."""

    computed: int
    wrong_kv_changes: bool | None
    deviation: float | None

    @property
    def hold(self) -> bool:
        return self.computed == 1 and self.wrong_kv_changes is not False


def verify(pair: EnginePair, plan: VerifyPlan) -> VerifyReport:
    """Run and compare. ContextLengthExceeded if prompt and answer do not fit the context."""
    context = pair.prefill_info.context
    if plan.prompt_tokens + plan.max_tokens > context:
        raise ContextLengthExceeded(
            f"{plan.prompt_tokens} prompt tokens + {plan.max_tokens} tokens to generate are over the context of "
            f"{context}",
            "lower --prompt-tokens or --max-tokens",
        )
    runs, answers, controls = run_all(pair, plan)
    info = pair.decode_engine.info
    same = plan.weights[0] == plan.weights[1]
    found = Comparisons.of(runs)
    again = found.prefill_again, found.decode_again
    limits = bounds(plan.dtype, same_weights=same, alone=found.prefill_vs_decode, again=again)
    alone = bounds_alone(plan.dtype, same_weights=same)
    refusal = pair.split_refusal
    splits = () if refusal else run_splits(pair, plan, answers, limits)
    return VerifyReport(
        architecture=info.profile.architecture,
        dtype=plan.dtype,
        versions=info.versions,
        prefill_versions=pair.prefill_info.versions,
        prefill=pair.prefill_info.backend,
        prefill_weights=plan.weights[0],
        decode=info.backend,
        decode_weights=plan.weights[1],
        same_weights=same,
        prompt_tokens=plan.prompt_tokens,
        max_tokens=plan.max_tokens,
        **found._asdict(),
        bounds=limits,
        bounds_alone=alone,
        wrong_kv_changes_output=controls.wrong_kv_changes,
        distinct_tokens=len(set(runs.handoff.tokens)),
        decode_computed_tokens=controls.computed,
        kv_bytes=info.layout.nbytes(plan.prompt_tokens - 1),
        deviation=controls.deviation,
        preflight=_findings(pair),
        summary=summary(pair.prefill_info.backend, info.backend, plan.max_tokens, found),
        splits=splits,
        split_refusal=refusal,
        ok=controls.hold and found.within(limits, alone) and all(one.ok for one in splits),
    )


def run_splits(
    pair: EnginePair, plan: VerifyPlan, alone: AnswersAlone, limits: VerifyBounds
) -> tuple[SplitComparison, ...]:
    """Answer the prompt with each of the splits. None of a prompt of one token, which has nothing to divide."""
    prompt, _ = pair.sample_prompts(plan.prompt_tokens)
    if len(prompt) == 1:
        return ()
    found = []
    for layers in split_layers(pair.decode_engine.info.split):
        answer = pair.split(prompt, _sampling(plan), layers, plan.chunk)
        computed = answer.timing.result().computed_prompt_tokens
        found.append(compare_split(layers, [answer.likeliest], alone, computed, limit=limits))
    return tuple(found)


def run_all(pair: EnginePair, plan: VerifyPlan) -> tuple[Runs, AnswersAlone, Controls]:
    """Answer the prompt in every way but a split, and compute the logits along the prefill engine's answer."""
    prompt, other = pair.sample_prompts(plan.prompt_tokens)
    count, pieces = plan.max_tokens, plan.prompt_tokens // 3 + 1
    sampling = _sampling(plan)
    by_prefill = pair.prefill.answer(prompt, count)
    alone = [token.id for token in by_prefill]
    forced = [*prompt, *alone[:-1]]
    kv = pair.hand_over(prompt, plan.chunk)
    handed_over = pair.decode(prompt, sampling, kv, UNBOUNDED)
    handoff = EngineRun(handed_over.tokens, pair.decode_logits(forced, count, kv))
    kv.release()
    by_decode = pair.decode(prompt, sampling, None)
    decoded = by_decode.tokens
    runs = Runs(
        handoff=handoff,
        prefill=EngineRun(alone, pair.prefill.logits(forced, count)),
        decode=EngineRun(decoded, pair.decode_logits(forced, count)),
        prefill_again=EngineRun(alone, pair.prefill.logits(forced, count, pieces)),
        decode_again=EngineRun(decoded, pair.decode_logits(forced, count, chunk_tokens=pieces)),
    )
    wrong = _wrong_kv(pair, other, prompt, sampling, plan.chunk)
    audit_bounds = audit.bounds(plan.dtype, AS_IS, same_weights=plan.weights[0] == plan.weights[1])
    timing = handed_over.timing.result()
    deviation = timing.audit.share(audit_bounds) if timing.audit is not None else None
    changes = None if wrong is None else wrong != handed_over.tokens
    answers = [by_prefill], [by_decode.likeliest]
    return runs, answers, Controls(timing.computed_prompt_tokens, changes, deviation)


def _sampling(plan: VerifyPlan) -> Sampling:
    return Sampling(max_tokens=plan.max_tokens, ignore_eos=True, logprobs=ALTERNATIVES)


def _findings(pair: EnginePair) -> tuple[BackendFinding, ...]:
    return tuple(
        BackendFinding(one.component, one.status, one.detail, backend=info.backend)
        for info in (pair.prefill_info, pair.decode_engine.info)
        for one in info.preflight
    )


def _wrong_kv(
    pair: EnginePair, other: Sequence[int], prompt: Sequence[int], sampling: Sampling, chunk: int | None
) -> list[int] | None:
    """The answer to `prompt` with the KV of `other`; None for a prompt of one token, which needs no KV."""
    if len(prompt) == 1:
        return None
    kv: ReceivedKV = pair.hand_over(other, chunk)
    try:
        return pair.decode(prompt, sampling, kv).tokens
    finally:
        kv.release()


def main(argv: list[str] | None = None) -> int:
    """Run the comparison. Returns 0 if the hand-off is as good as it must be, 1 if not, and the error's exit code after
    an error."""
    arguments = parser().parse_args(argv)
    logs.configure()
    logs.log.setLevel(logging.WARNING)
    try:
        found = report(arguments)
    except DisaggError as error:
        _print({"error": error.to_json(), "ok": False})
        return error.exit_code
    _print(found.to_json())
    return 0 if found.ok else 1


def report(arguments: argparse.Namespace) -> VerifyReport:
    """Load both engines as the arguments state, and compare. Raises what `EnginePair.load` and `verify` raise."""
    # Without --context, the model's longest: the preflight must not pass because the prompt is short.
    needed = arguments.prompt_tokens + arguments.max_tokens
    prefill = Reference.open(arguments.prefill_source, arguments.context, needed)
    decode = Reference.open(arguments.decode_source, prefill.profile.context)
    spec = PrefillSpec(
        engine=arguments.prefill_engine,
        source=str(prefill.path),
        context=prefill.profile.context,
        dtype=arguments.dtype,
        device=arguments.device,
        quantization=arguments.quantization,
        python=arguments.prefill_python,
    )
    weights = prefill.weights(arguments.dtype, arguments.quantization), decode.weights(arguments.dtype)
    with EnginePair.load(spec, prefill, str(decode.path), EngineOptions(DECODE_ENGINE, dtype=arguments.dtype)) as pair:
        return verify(
            pair,
            VerifyPlan(arguments.dtype, weights, arguments.prompt_tokens, arguments.max_tokens, arguments.chunk),
        )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(prog="python -m disagg.verify", description=__doc__)
    command.add_argument("prefill_source", help="checkpoint folder or hub id for the prefill engine")
    command.add_argument("decode_source", help="the same for mlx-lm")
    command.add_argument("--prefill-engine", choices=PREFILL_ENGINES, default=PREFILL_ENGINES[0])
    command.add_argument("--prefill-python", default=None, help="of that engine's environment; default: this one")
    command.add_argument("--quantization", default=None, help="of transformers' weights, as in hosts.toml")
    command.add_argument("--context", type=_positive, default=None, help="default: the model's longest")
    command.add_argument("--prompt-tokens", type=_positive, default=200)
    command.add_argument("--max-tokens", type=_positive, default=64)
    command.add_argument("--chunk", type=_positive, default=None, help="tokens per prefill chunk")
    command.add_argument("--dtype", choices=get_args(DType), default="float32")
    command.add_argument("--device", default="auto", help="of the prefill engine")
    return command


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _print(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    exit_without_cleanup(main())
