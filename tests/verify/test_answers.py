"""Answers of two ways, compared by the likeliest tokens that their hosts state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from disagg.api.events import TokenLogprob
from disagg.api.names import Role
from disagg.api.verify import RunComparison
from disagg.config import DType, EngineOptions, Host, Model
from disagg.verify.compare import ALONE, MAX_LOGIT_DIFF, NOISE, agrees, compare_answers, limits, same_weights


def token(id: int, *, likely: float = 0.8, other: int = 99) -> TokenLogprob:
    """A token of this probability, and one alternative with most of the rest."""
    top = ((id, math.log(likely)), (other, math.log((1 - likely) * 0.9)))
    return TokenLogprob(id, math.log(likely), top)


def answer(*ids: int, likely: float = 0.8) -> Sequence[TokenLogprob]:
    return [token(id, likely=likely) for id in ids]


def host(name: str, engine: EngineOptions) -> Host:
    role: Role = "decode" if engine.name == "mlx" else "prefill"
    return Host(name, "127.0.0.1", (role,), "m", engine, 1)


def test_equal_answers_differ_by_nothing() -> None:
    found = compare_answers([answer(1, 2, 3), answer(4, 5, 6)], [answer(1, 2, 3), answer(4, 5, 6)])
    assert (found.equal_tokens, found.first_divergence, found.max_logit_diff, found.mean_kl) == (6, None, 0.0, 0.0)
    assert found.top1 == 1.0


def test_answers_are_compared_until_their_first_difference() -> None:
    found = compare_answers([answer(1, 2, 3), answer(4, 5, 6)], [answer(1, 7, 8), answer(4, 5, 9)])
    assert (found.equal_tokens, found.first_divergence) == (3, 1), "token 3 of the first answer continues another text"
    assert found.top1 == 3 / 5


def test_the_divergence_is_that_of_the_stated_tokens_and_of_all_others_as_one() -> None:
    found = compare_answers([answer(1, likely=0.5)], [answer(1, likely=0.8)])
    expected = sum(p * math.log(p / q) for p, q in ((0.8, 0.5), (0.18, 0.45), (0.02, 0.05)))
    assert found.mean_kl == pytest.approx(expected)
    assert found.max_logit_diff == pytest.approx(math.log(0.45 / 0.18))


def test_a_distribution_without_a_rest_is_no_error() -> None:
    certain = [TokenLogprob(1, 0.0, ((1, 0.0),))]
    assert compare_answers([certain], [certain]).mean_kl == 0.0


MODEL = Model("m", {"transformers": "same", "vllm": "other", "vllm-server": "same", "mlx": "same"}, 4096)
DECODE = host("mac", EngineOptions("mlx"))


@pytest.mark.parametrize(
    ("engine", "same"),
    [
        (EngineOptions("transformers"), True),
        (EngineOptions("transformers", quantization="int8"), False),
        (EngineOptions("vllm"), False),
        (EngineOptions("vllm-server"), False),
    ],
)
def test_weights_are_the_same_if_both_hosts_load_one_source_as_it_is(engine: EngineOptions, same: bool) -> None:
    assert same_weights(MODEL, host("dgx", engine), DECODE) is same


EQUAL = compare_answers([answer(1, 2)], [answer(1, 2)])


@pytest.mark.parametrize(
    ("dtype", "as_is", "bounds_of", "alone_of"),
    [
        ("float32", True, "float32", "float32"),
        ("float32", False, "bfloat16", "float32"),
        ("float16", True, "float16", "float16"),
        ("bfloat16", True, "bfloat16", "bfloat16"),
    ],
)
def test_the_bounds_are_those_of_the_dtype_and_of_the_form_of_the_kv(
    dtype: DType, as_is: bool, bounds_of: DType, alone_of: DType
) -> None:
    pair = host("dgx", EngineOptions("transformers", dtype=dtype)), host("mac", EngineOptions("mlx", dtype=dtype))
    assert limits(*pair, same=True, as_is=as_is, alone=EQUAL) == (NOISE[bounds_of], ALONE[alone_of])


def of(**changed: object) -> RunComparison:
    exact = {"equal_tokens": 64, "first_divergence": None, "max_logit_diff": 0.0, "mean_kl": 0.0}
    share = {"top1": 1.0, "top1_low": 0.9, "top1_high": 1.0}
    return RunComparison.from_json({**exact, **share, **changed})


@pytest.mark.parametrize(
    ("dtype", "found", "ok"),
    [
        ("float32", of(), True),
        ("float32", of(first_divergence=63), False),
        ("float32", of(max_logit_diff=2 * MAX_LOGIT_DIFF), False),
        ("float32", of(mean_kl=1e-4), False),
        ("bfloat16", of(first_divergence=7, max_logit_diff=0.2, mean_kl=1e-3, top1=0.97), True),
        ("bfloat16", of(mean_kl=0.2), False),
        ("bfloat16", of(top1=0.8, top1_low=0.6, top1_high=0.92), True),
        ("bfloat16", of(top1=0.3, top1_low=0.1, top1_high=0.6), False),
    ],
)
def test_in_float32_every_token_must_agree_and_else_the_noise_of_the_dtype_decides(
    dtype: DType, found: RunComparison, ok: bool
) -> None:
    assert agrees(found, NOISE[dtype]) is ok


def test_a_host_with_other_probabilities_and_the_same_tokens_is_found_out() -> None:
    found = compare_answers([answer(1, 2, likely=0.55)], [answer(1, 2, likely=0.95)])
    assert found.first_divergence is None
    assert not agrees(found, NOISE["bfloat16"])
    assert agrees(replace_kl(found), NOISE["bfloat16"])


def replace_kl(found: RunComparison) -> RunComparison:
    return RunComparison.from_json({**found.to_json(), "mean_kl": 0.0})
