"""What both engines of a model find likeliest after the same text, when they have been loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from disagg.api.status import Evidence
from disagg.engines.model.evidence import PLACES
from tests.engines.architectures.configs import config
from tests.engines.architectures.pairs import Pair, running
from tests.tiny_models import WINDOW


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(config("exaone4"), tmp_path_factory.mktemp("exaone4")) as pair:
        pair.prefill.warm_up()
        pair.decode.warm_up()
        yield pair


def both(pair: Pair) -> tuple[Evidence, Evidence]:
    found = pair.prefill.info.evidence, pair.decode.info.evidence
    assert found[0] is not None and found[1] is not None
    return found[0], found[1]


def test_both_engines_state_the_same_after_a_text_beyond_the_window(pair: Pair) -> None:
    ours, theirs = both(pair)
    assert ours.tokens == theirs.tokens > WINDOW
    assert (ours.agreeing(theirs) or 0) >= PLACES - 1, "one place may be a tie"
    assert len(set(ours.likeliest)) > PLACES / 4, "one token again and again proves nothing"


def test_an_engine_with_other_frequencies_states_something_else(pair: Pair) -> None:
    _, theirs = both(pair)
    pair.prefill._model.model.rotary_emb.inv_freq *= 1.4
    try:
        ours = pair.prefill.evidence()
    finally:
        pair.prefill._model.model.rotary_emb.inv_freq /= 1.4
    assert ours.prompt == theirs.prompt
    assert (ours.agreeing(theirs) or 0) < PLACES / 2
