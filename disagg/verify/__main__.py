"""`python -m disagg.verify`: is a hand-off of this model exact? One JSON object on stdout.

Loads the model in both frameworks, in this one process, and runs the same prompt three ways: handed over through a
real TCP transfer, by transformers alone, by mlx-lm alone. Then teacher-forces the answer through all three and
compares the logits. A control with another prompt's KV must change the answer: else the comparison proves nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy

from disagg.api.sampling import Sampling
from disagg.config import DType, EngineOptions
from disagg.engines.exit import exit_without_cleanup
from disagg.engines.model import checkpoint
from disagg.errors import ContextLengthExceeded, DisaggError
from disagg.kv.received import ReceivedKV
from disagg.servers import logs
from disagg.verify.pair import Pair

MAX_LOGIT_DIFF = 1e-2  # float32; 3e-6 to 2e-3 were measured over thirteen architectures (gemma3 the largest)
# Half precision: two frameworks round differently, so both bounds allow for what a single engine's rounding does.
MAX_KL = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-2}
MIN_TOP1 = {"float32": 1.0, "float16": 0.95, "bfloat16": 0.85}

Logits = Any  # numpy.ndarray [positions, vocab] of float64


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one prompt. equal_tokens: how many leading tokens agree; first_divergence: index of the first that
    does not, None where all agree. The rest compares logits at the same forced tokens: nats, and a share of 1."""

    equal_tokens: int
    first_divergence: int | None
    max_logit_diff: float
    mean_kl: float
    top1: float

    def within(self, dtype: DType) -> bool:
        """Whether the two runs agree as well as this dtype allows. float32 must agree in every token."""
        exact = dtype != "float32" or (self.first_divergence is None and self.max_logit_diff <= MAX_LOGIT_DIFF)
        return exact and self.mean_kl <= MAX_KL[dtype] and self.top1 >= MIN_TOP1[dtype]


@dataclass(frozen=True, slots=True)
class Run:
    """One way of answering: the greedy tokens, and the logits along the forced answer."""

    tokens: list[int]
    logits: Logits

    def against(self, other: Run) -> Comparison:
        """How this run compares with another."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        divergence = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        ours, theirs = _log_softmax(self.logits), _log_softmax(other.logits)
        return Comparison(
            equal_tokens=len(self.tokens) if divergence is None else divergence,
            first_divergence=divergence,
            max_logit_diff=float(numpy.abs(self.logits - other.logits).max()),
            mean_kl=max(0.0, float((numpy.exp(theirs) * (theirs - ours)).sum(-1).mean())),
            top1=float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        )


def verify(pair: Pair, dtype: DType, prompt_tokens: int, max_tokens: int, chunk: int | None) -> dict[str, Any]:
    """The whole report; see the module and `disagg verify --help` for its keys."""
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
    comparisons = {
        "handoff_vs_prefill": handoff.against(prefill),
        "handoff_vs_decode": handoff.against(decode),
        "prefill_vs_decode": prefill.against(decode),
    }
    wrong = _wrong_kv(pair, other, prompt, sampling, chunk)
    changes = None if wrong is None else wrong != handoff_tokens
    return {
        "architecture": pair.prefill.info.profile.architecture,
        "dtype": dtype,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        **{name: asdict(comparison) for name, comparison in comparisons.items()},
        "wrong_kv_changes_output": changes,
        "distinct_tokens": len(set(handoff_tokens)),
        "decode_computed_tokens": computed,
        "kv_bytes": pair.prefill.info.layout.nbytes(prompt_tokens - 1),
        "preflight": [
            {"backend": info.backend, **finding.to_json()}
            for info in (pair.prefill.info, pair.decode_engine.info)
            for finding in info.preflight
        ],
        "ok": all(c.within(dtype) for c in comparisons.values()) and changes is not False and computed == 1,
    }


def _wrong_kv(
    pair: Pair, other: Sequence[int], prompt: Sequence[int], sampling: Sampling, chunk: int | None
) -> list[int] | None:
    """The answer to `prompt` from the KV of `other`; None for a prompt of one token, which needs no KV."""
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
    """Run the check; 0 where the hand-off is exact, 1 where it is not, the error's code where it cannot be told."""
    arguments = _parser().parse_args(argv)
    logs.configure()
    logs.log.setLevel(logging.WARNING)
    try:
        report = _report(arguments)
    except DisaggError as error:
        _print({"error": error.to_json(), "ok": False})
        return error.exit_code
    _print(report)
    return 0 if report["ok"] else 1


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    options = EngineOptions("transformers", dtype=arguments.dtype, device=arguments.device)
    # Without --context the model's whole range counts: preflight must not pass because the prompt is short.
    path = checkpoint.resolve(arguments.prefill_source)
    wanted = arguments.prompt_tokens + arguments.max_tokens
    context = arguments.context or checkpoint.longest_context(path) or wanted
    with Pair.load(arguments.prefill_source, arguments.decode_source, options, context) as pair:
        return verify(pair, arguments.dtype, arguments.prompt_tokens, arguments.max_tokens, arguments.chunk)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m disagg.verify", description=__doc__)
    parser.add_argument("prefill_source", help="checkpoint folder or hub id for transformers")
    parser.add_argument("decode_source", help="the same for mlx-lm")
    parser.add_argument("--context", type=_positive, default=None, help="default: all that the model reads")
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
