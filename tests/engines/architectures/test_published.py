"""Published configurations, tiny, that a framework reads otherwise than the others until disagg sets it right."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.config import EngineOptions
from disagg.engines.model.reference import _text_config
from disagg.planning.refusals import known_as, refusal, refusal_of_context
from disagg.planning.verdicts import verdict
from tests.surveys.fuzz import outcome
from tests.surveys.published import context, published, shrunk
from tests.tiny_models import write_json

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


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # of configurations, as published
def test_the_verdict_before_a_download_refuses_what_the_load_refuses_by_its_configuration(tmp_path: Path) -> None:
    engine = EngineOptions("transformers", device="cpu")
    for name, entry in published().items():
        write_json(tmp_path / "config.json", entry)
        said, text = verdict(entry, engine, 131072), _text_config(tmp_path, 131072)
        refused = refusal(text, type(text), known_as(entry["model_type"])) or refusal_of_context(text, 131072)
        assert (said.why if said.sure else "") == refused, name
