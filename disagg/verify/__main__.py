"""`python -m disagg.verify`: compare a hand-off of a model with each engine alone. Prints a VerifyReport as JSON.

Loads the model in both frameworks in this process and answers one prompt three times: after a hand-off over TCP, with
transformers alone, and with mlx-lm alone. Then teacher-forces one answer through all three and compares the logits. As
a control, another prompt's KV must change the answer; otherwise the comparison shows nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy

from disagg import logs
from disagg.api.sampling import Sampling
from disagg.api.verify import BackendFinding, RunComparison, VerifyReport
from disagg.config import DType, EngineOptions
from disagg.engines.exit import exit_without_cleanup
from disagg.engines.model import checkpoint
from disagg.errors import ContextLengthExceeded, DisaggError
from disagg.kv.received import ReceivedKV
from disagg.verify.pair import EnginePair

MAX_LOGIT_DIFF = 1e-2  # float32; 3e-6 to 2e-3 were measured over thirteen architectures (gemma3 the largest)
# In half precision the frameworks round differently; the bounds allow for the rounding noise of a single engine.
MAX_KL = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-2}
MIN_TOP1 = {"float32": 1.0, "float16": 0.95, "bfloat16": 0.85}

Logits = Any  # numpy.ndarray [positions, vocab] of float64


@dataclass(frozen=True, slots=True)
class Run:
    """One engine's run: its greedy tokens, and its logits along the forced answer."""

    tokens: list[int]
    logits: Logits

    def compared_with(self, other: Run) -> RunComparison:
        pairs = zip(self.tokens, other.tokens, strict=True)
        divergence = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        ours, theirs = _log_softmax(self.logits), _log_softmax(other.logits)
        return RunComparison(
            equal_tokens=len(self.tokens) if divergence is None else divergence,
            first_divergence=divergence,
            max_logit_diff=float(numpy.abs(self.logits - other.logits).max()),
            mean_kl=max(0.0, float((numpy.exp(theirs) * (theirs - ours)).sum(-1).mean())),
            top1=float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        )


def agrees(comparison: RunComparison, dtype: DType) -> bool:
    """Whether two runs agree as well as this dtype allows. In float32 every token must agree."""
    same_tokens = comparison.first_divergence is None and comparison.max_logit_diff <= MAX_LOGIT_DIFF
    exact = dtype != "float32" or same_tokens
    return exact and comparison.mean_kl <= MAX_KL[dtype] and comparison.top1 >= MIN_TOP1[dtype]


def verify(pair: EnginePair, dtype: DType, prompt_tokens: int, max_tokens: int, chunk: int | None) -> VerifyReport:
    """Run and compare. ContextLengthExceeded if prompt and answer do not fit the context."""
    context = pair.prefill.info.profile.context
    if prompt_tokens + max_tokens > context:
        raise ContextLengthExceeded(
            f"{prompt_tokens} prompt tokens + {max_tokens} tokens to generate are over the context of {context}",
            "lower --prompt-tokens or --max-tokens",
        )
    prompt, other = pair.sample_prompts(prompt_tokens)
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    prefill_tokens = pair.prefill_alone(prompt, sampling)
    forced = [*prompt, *prefill_tokens[:-1]]
    kv = pair.hand_over(prompt, chunk)
    handoff_tokens, computed = pair.decode(prompt, sampling, kv)
    handoff = Run(handoff_tokens, _array(pair.decode_engine.logits(forced, max_tokens, kv)))
    kv.release()
    prefill = Run(prefill_tokens, _array(pair.prefill.logits(forced, max_tokens)))
    decode_tokens, _ = pair.decode(prompt, sampling, None)
    decode = Run(decode_tokens, _array(pair.decode_engine.logits(forced, max_tokens)))
    wrong = _wrong_kv(pair, other, prompt, sampling, chunk)
    changes = None if wrong is None else wrong != handoff_tokens
    comparisons = handoff.compared_with(prefill), handoff.compared_with(decode), prefill.compared_with(decode)
    return VerifyReport(
        architecture=pair.prefill.info.profile.architecture,
        dtype=dtype,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        handoff_vs_prefill=comparisons[0],
        handoff_vs_decode=comparisons[1],
        prefill_vs_decode=comparisons[2],
        wrong_kv_changes_output=changes,
        distinct_tokens=len(set(handoff_tokens)),
        decode_computed_tokens=computed,
        kv_bytes=pair.prefill.info.layout.nbytes(prompt_tokens - 1),
        preflight=_findings(pair),
        ok=all(agrees(one, dtype) for one in comparisons) and changes is not False and computed == 1,
    )


def _findings(pair: EnginePair) -> tuple[BackendFinding, ...]:
    return tuple(
        BackendFinding(one.component, one.status, one.detail, backend=info.backend)
        for info in (pair.prefill.info, pair.decode_engine.info)
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
        return pair.decode(prompt, sampling, kv)[0]
    finally:
        kv.release()


def _array(logits: list[list[float]]) -> Logits:
    return numpy.asarray(logits, dtype=numpy.float64)


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - numpy.log(numpy.exp(shifted).sum(-1, keepdims=True))


def main(argv: list[str] | None = None) -> int:
    """Run the comparison. Returns 0 if the hand-off is exact, 1 if not, and the error's exit code after an error."""
    arguments = _parser().parse_args(argv)
    logs.configure()
    logs.log.setLevel(logging.WARNING)
    try:
        report = _report(arguments)
    except DisaggError as error:
        _print({"error": error.to_json(), "ok": False})
        return error.exit_code
    _print(report.to_json())
    return 0 if report.ok else 1


def _report(arguments: argparse.Namespace) -> VerifyReport:
    options = EngineOptions("transformers", dtype=arguments.dtype, device=arguments.device)
    # Without --context, the model's longest: the preflight must not pass because the prompt is short.
    path = checkpoint.resolve(arguments.prefill_source)
    needed = arguments.prompt_tokens + arguments.max_tokens
    context = arguments.context or checkpoint.longest_context(path) or needed
    with EnginePair.load(arguments.prefill_source, arguments.decode_source, options, context) as pair:
        return verify(pair, arguments.dtype, arguments.prompt_tokens, arguments.max_tokens, arguments.chunk)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m disagg.verify", description=__doc__)
    parser.add_argument("prefill_source", help="checkpoint folder or hub id for transformers")
    parser.add_argument("decode_source", help="the same for mlx-lm")
    parser.add_argument("--context", type=_positive, default=None, help="default: the model's longest")
    parser.add_argument("--prompt-tokens", type=_positive, default=200)
    parser.add_argument("--max-tokens", type=_positive, default=64)
    parser.add_argument("--chunk", type=_positive, default=None, help="tokens per prefill chunk")
    parser.add_argument("--dtype", choices=get_args(DType), default="float32")
    parser.add_argument("--device", default="auto")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _print(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    exit_without_cleanup(main())
