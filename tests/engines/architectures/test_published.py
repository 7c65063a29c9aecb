"""Published configurations, tiny, that a framework reads otherwise than the others until disagg sets it right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.surveys.fuzz import outcome
from tests.surveys.published import context, published, shrunk

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/DeepSeek-V3",  # weights of a layer behind the last one, which draft tokens
        "google/gemma-3-4b-it",  # sizes that its config.json leaves out, a vocabulary in its text part
        "ibm-granite/granite-4.0-micro",  # layers of one kind, under a name of its own
        "internlm/internlm3-8b-instruct",  # a dynamic rope
        "microsoft/Phi-3.5-MoE-instruct",  # a rope with a scale of its own
        "microsoft/Phi-4-mini-instruct",  # a rope with a set for long prompts
        "moonshotai/Kimi-K2-Instruct-0905",  # a type that is another one, with code of its own
        "tencent/Hunyuan-7B-Instruct",  # a rope that is called dynamic, and is not
        "XiaomiMiMo/MiMo-7B-RL",  # a type that is another one
    ],
)
def test_a_published_configuration_is_answered_as_by_each_framework_alone(name: str, tmp_path: Path) -> None:
    assert outcome(shrunk(published()[name]), tmp_path / "model", (2, 161)) in ("exact", "patched")


def test_every_published_configuration_has_a_tiny_form_with_the_same_keys() -> None:
    for name, entry in published().items():
        tiny = shrunk(entry)
        ours, theirs = (one.get("text_config", one) for one in (tiny, entry))
        assert theirs.keys() <= ours.keys(), name
        assert ours["num_hidden_layers"] <= theirs["num_hidden_layers"], name
        assert 0 < context(tiny) <= 2048, name
