"""disagg/engines/vllm/served/description.py: each reason to give a `vllm serve` no orders, in words that help."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.api.delivery import DESCRIBE, ORDER_FIELD, ConnectorInfo, OrderAnswer
from disagg.api.layout import Layout
from disagg.api.status import PreflightFinding
from disagg.engines.vllm.served.calls import VLLMServer
from disagg.engines.vllm.served.description import describe, require
from disagg.errors import DisaggError, ModelError, PreflightRefused
from tests.engines.vllm.served.fake_serve import INFO, completed, serving
from tests.kv.kv_parts import FINGERPRINT, mixed_layout
from tests.ports import free_ports

DESCRIBED = completed(OrderAnswer(connector=INFO).to_json())


def test_a_server_with_the_connector_is_known_by_its_model_and_what_the_connector_says() -> None:
    with serving(lambda body: (200, DESCRIBED)) as fake:
        assert describe(VLLMServer(fake.url), None) == ("tiny", INFO)
        assert describe(VLLMServer(fake.url), "tiny") == ("tiny", INFO)
    assert fake.bodies[0]["kv_transfer_params"] == {ORDER_FIELD: DESCRIBE}


@pytest.mark.parametrize(
    ("content", "wanted", "message", "hint"),
    [
        (completed(None), None, "has no connector of disagg", "--kv-transfer-config"),
        (DESCRIBED, "another", "serves tiny, not another", "correct engine.model; an adapter"),
        (completed(OrderAnswer().to_json()), None, "knows nothing of its ranks", "VLLM_ENABLE_V1_MULTIPROCESSING"),
        (completed({"error": {"message": "it is full"}}), None, "it is full", ""),
        (b"hello", None, "no answer of vllm serve", "correct the url"),
    ],
    ids=["no connector", "another name", "no ranks", "an error", "another server"],
)
def test_a_server_that_cannot_be_ordered_anything_is_refused(
    content: bytes, wanted: str | None, message: str, hint: str
) -> None:
    with serving(lambda body: (200, content)) as fake, pytest.raises(DisaggError, match=message) as caught:
        describe(VLLMServer(fake.url), wanted)
    assert hint in caught.value.hint


def test_a_server_whose_first_answer_says_nothing_of_states_is_asked_once_more() -> None:
    seen = PreflightFinding("states", "refused", "they lie in an unknown order")
    second = msgspec.structs.replace(INFO, preflight=(seen,))
    answers = iter((INFO, second, second))
    with serving(lambda body: (200, completed(OrderAnswer(connector=next(answers)).to_json()))) as fake:
        assert describe(VLLMServer(fake.url), None, 7, states=True) == ("tiny", second)
        assert describe(VLLMServer(fake.url), None, 7, states=True) == ("tiny", second)
    assert [body["prompt"] for body in fake.bodies] == [[7]] * 3
    with pytest.raises(PreflightRefused, match="they lie in an unknown order"):
        require(second, "http://there", mixed_layout(), FINGERPRINT, context=64)


def test_a_server_that_is_not_there_is_named_by_its_url() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ModelError, match=f"no vllm serve answers at {url}"):
        describe(VLLMServer(url), None)


def test_a_server_that_has_the_same_model_and_kv_is_accepted() -> None:
    require(INFO, "http://there", mixed_layout(), FINGERPRINT, context=64)


@pytest.mark.parametrize(
    ("changes", "kind", "message", "hint"),
    [
        (
            {"version": "0.0.9"},
            ModelError,
            "has disagg 0.0.9, this host",
            "pip install '.[server]' in a clone of disagg",
        ),
        (
            {"fingerprint": {**INFO.fingerprint, "rope": "other"}},
            ModelError,
            "serves another model: .*rope",
            "revision",
        ),
        ({"layout": Layout(mixed_layout().layers, "float16").to_json()}, ModelError, "other KV: .*dtype", "--dtype"),
        ({"context": 63}, ModelError, "serves 63 tokens, .* is 64", "--max-model-len 64"),
        ({"preflight": (PreflightFinding("rope", "refused", "other"),)}, PreflightRefused, "rope: other", ""),
    ],
    ids=["version", "model", "dtype", "context", "preflight"],
)
def test_a_server_whose_kv_would_be_wrong_is_refused(
    changes: dict[str, Any], kind: type[DisaggError], message: str, hint: str
) -> None:
    found: ConnectorInfo = msgspec.structs.replace(INFO, **changes)
    with pytest.raises(kind, match=message) as caught:
        require(found, "http://there", mixed_layout(), FINGERPRINT, context=64)
    assert hint in caught.value.hint
