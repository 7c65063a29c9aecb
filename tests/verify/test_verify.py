"""`python -m disagg.verify` on the demo's trained mixture: with the same weights on both ends, and with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import disagg.demo
from disagg.api.verify import VerifyReport
from disagg.verify import __main__ as program
from disagg.verify.prefill import PrefillSpec
from tests.fleets import preloaded_command

SPLITS = (1, 2, 3)
MODEL = Path(disagg.demo.__file__).parent / "models" / "qwen3-moe-tiny"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in MLX's 4-bit form, as mlx_lm.convert makes it."""
    from mlx_lm import convert

    folder = tmp_path_factory.mktemp("converted") / "model"
    convert(str(MODEL), str(folder), quantize=True, q_bits=4, q_group_size=64)
    return folder


@pytest.fixture(autouse=True)
def forked_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill engine's process is a fork of one that has imported torch and transformers, which takes 5 s."""
    command, environment = preloaded_command()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    argv = vars(PrefillSpec)["argv"].fget
    monkeypatch.setattr(PrefillSpec, "argv", property(lambda spec: [*command, *argv(spec)[3:]]))


def verify(*arguments: Any) -> VerifyReport:
    every = (*arguments, "--prompt-tokens", 100, "--context", 1024)
    return program.report(program.parser().parse_args([str(argument) for argument in every]))


def test_the_same_weights_give_the_same_answer() -> None:
    report = verify(MODEL, MODEL, "--max-tokens", 32)
    assert (report.ok, report.same_weights) == (True, True)
    assert (report.prefill, report.decode) == ("transformers/cpu", "mlx/cpu")
    assert report.handoff_vs_decode.first_divergence is None and report.handoff_vs_prefill.first_divergence is None
    assert report.decode_again.top1 == report.prefill_again.top1 == 1.0
    assert report.wrong_kv_changes_output and report.decode_computed_tokens == 1
    assert report.deviation is not None and 0 < report.deviation < 0.2
    assert [(one.layers, one.ok, one.computed_tokens) for one in report.splits] == [
        (layers, True, 1) for layers in SPLITS
    ]
    for one in report.splits:
        assert one.vs_prefill is not None and one.vs_prefill.equal_tokens == 32
        assert one.vs_decode is not None and one.vs_decode.equal_tokens == 32


def test_other_weights_are_judged_by_what_the_two_engines_differ_by(four_bits: Path) -> None:
    report = verify(MODEL, four_bits, "--max-tokens", 64)
    assert (report.ok, report.same_weights) == (True, False)
    assert report.prefill_weights == "float32" and "4-bit, groups of 64" in report.decode_weights
    assert report.bounds.max_logit_diff is None
    assert 1e-3 < report.prefill_vs_decode.mean_kl < 0.5, "weights of 4 bits differ from the original's"
    assert report.decode_again.mean_kl < 1e-6, "one engine does not differ from itself"
    assert report.wrong_kv_changes_output
    assert f"{report.handoff_vs_decode.top1:.1%} of 64 next tokens" in report.summary
