"""What a server answers to a request it cannot serve: one clear message, the right status, and it goes on serving."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, cast

import httpx
import pytest

from disagg.inference.client import Client
from tests import tiny_models
from tests.deadlines import wait_until
from tests.fleets import RunningFleet, running, write_hosts

PROMPT = {"model": "tiny", "prompt": "def fibonacci(n):"}
DELIVERY = {"deliver": {"host": "127.0.0.1", "port": 1}, "ticket": "x" * 43}
PROGRESS = "event: progress"
BOTH = pytest.mark.parametrize("host", ["tiny-prefill", "tiny-decode"])


@pytest.fixture(scope="module")
def client(tiny_fleet: RunningFleet) -> Iterator[Client]:
    with tiny_fleet.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _serves_afterwards(tiny_fleet: RunningFleet, client: Client) -> Iterator[None]:
    yield
    assert len(client.generate("tiny", "x = 1", max_tokens=2).tokens) == 2
    for host in tiny_fleet.fleet.hosts:
        wait_until(partial(idle, tiny_fleet, host), 60, f"{host} to hold nothing")


def idle(fleet: RunningFleet, host: str) -> bool:
    status = fleet.status(host)
    return (status["running"], status["queue"], status["kv_bytes"]) == (0, 0, 0)


def refusal(fleet: RunningFleet, host: str, path: str = "/generate", **request: Any) -> tuple[int, dict[str, str]]:
    """POST something bad; the status and the error."""
    with fleet.http(host) as http:
        answer = http.post(path, **request)
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "hint", "retry_after_s"}
    assert "\n" not in error["message"]
    return answer.status_code, error


@BOTH
def test_an_unknown_model_is_404_and_names_the_one_served(tiny_fleet: RunningFleet, host: str) -> None:
    status, error = refusal(tiny_fleet, host, json={**PROMPT, "model": "llama"})
    assert status == httpx.codes.NOT_FOUND
    assert error["code"] == "UnknownModel"
    assert "tiny" in error["message"] and "'llama'" in error["message"]


@BOTH
@pytest.mark.parametrize(
    "prompt", [{"prompt": ""}, {"tokens": []}, {"messages": []}], ids=["text", "token ids", "messages"]
)
def test_an_empty_prompt_is_refused(tiny_fleet: RunningFleet, host: str, prompt: dict[str, Any]) -> None:
    status, error = refusal(tiny_fleet, host, json={"model": "tiny", **prompt})
    assert status == httpx.codes.BAD_REQUEST
    assert "empty" in error["message"]


@BOTH
def test_over_the_context_says_both_numbers(tiny_fleet: RunningFleet, host: str) -> None:
    body = {"model": "tiny", "tokens": [9] * 4000, "sampling": {"max_tokens": 97}}
    status, error = refusal(tiny_fleet, host, json=body)
    assert status == httpx.codes.BAD_REQUEST
    assert error["code"] == "ContextLengthExceeded"
    assert "4000 prompt tokens + 97 max_tokens = 4097" in error["message"] and "4096" in error["message"]


@pytest.fixture(scope="module")
def short_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A fleet with a context of 128: MLX on a CPU needs seconds for 4,096 tokens."""
    folder = tmp_path_factory.mktemp("short-context")
    model = tiny_models.make("qwen3", folder / "model")
    with running(write_hosts(folder, {"tiny": model}, context=128)) as fleet:
        yield fleet


@BOTH
def test_an_answer_that_may_fit_the_context_gets_what_the_prompt_leaves(short_context: RunningFleet, host: str) -> None:
    sampling = {"max_tokens": 1000, "fit_context": True, "ignore_eos": True}
    with short_context.http(host) as http:
        answer = http.post("/generate", json={"model": "tiny", "tokens": [9] * 122, "sampling": sampling})
    assert '"completion_tokens":6' in answer.text, answer.text


@BOTH
def test_a_prompt_that_fills_the_context_is_refused_however_short_its_answer(
    tiny_fleet: RunningFleet, host: str
) -> None:
    body = {"model": "tiny", "tokens": [9] * 4096, "sampling": {"fit_context": True}}
    status, error = refusal(tiny_fleet, host, json=body)
    assert (status, error["code"]) == (httpx.codes.BAD_REQUEST, "ContextLengthExceeded")


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("seed", -1),
        ("stop", [""]),
        ("stop", "end"),
        ("stop", ["x"] * 17),
        ("logprobs", 21),
        ("temprature", 1.0),
    ],
)
def test_a_bad_sampling_value_is_named(tiny_fleet: RunningFleet, host: str, field: str, value: Any) -> None:
    status, error = refusal(tiny_fleet, host, json={**PROMPT, "sampling": {field: value}})
    assert status == httpx.codes.BAD_REQUEST
    assert error["code"] == "RequestError"
    assert f"sampling.{field}" in error["message"]


@BOTH
@pytest.mark.parametrize("tokens", [[-1], [1 << 31], [640], ["a"]])
def test_token_ids_outside_the_vocabulary_are_refused(tiny_fleet: RunningFleet, host: str, tokens: list[Any]) -> None:
    status, error = refusal(tiny_fleet, host, json={"model": "tiny", "tokens": tokens})
    assert status == httpx.codes.BAD_REQUEST
    assert str(tokens[0]) in error["message"]


@BOTH
def test_two_kinds_of_prompt_are_refused(tiny_fleet: RunningFleet, host: str) -> None:
    _, error = refusal(tiny_fleet, host, json={**PROMPT, "tokens": [1]})
    assert "exactly one of prompt, messages and tokens" in error["message"]


@BOTH
@pytest.mark.parametrize("content", [b"", b"{", b"prompt=x", b"\xff\xfe", b"[1]", b'{"model": "tiny"}', b"1e999"])
def test_a_body_that_is_no_request_is_400(tiny_fleet: RunningFleet, host: str, content: bytes) -> None:
    status, error = refusal(tiny_fleet, host, content=content)
    assert status == httpx.codes.BAD_REQUEST
    assert error["code"] == "RequestError"


@BOTH
def test_a_body_too_large_is_413(tiny_fleet: RunningFleet, host: str) -> None:
    with tiny_fleet.http(host) as http:
        answer = http.post("/generate", content=b"x" * (17 << 20))
    assert answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
    assert answer.json()["error"]["code"] == "BodyTooLarge"


@BOTH
@pytest.mark.parametrize("token", ["", "wrong", "test-token-of-sixteen-or-mor"])
@pytest.mark.parametrize("path", ["/status", "/generate", "/nowhere"])
def test_without_the_fleets_token_nothing_but_liveness_answers(
    tiny_fleet: RunningFleet, host: str, token: str, path: str
) -> None:
    with tiny_fleet.http(host, token) as http:
        answer = http.post(path, json=PROMPT)
        liveness = http.get("/health")
    assert answer.status_code == httpx.codes.UNAUTHORIZED
    assert answer.json()["error"]["code"] == "Unauthorized"
    assert liveness.json() == {"status": "ok"}


@BOTH
def test_unknown_paths_and_methods_are_errors_of_the_same_form(tiny_fleet: RunningFleet, host: str) -> None:
    assert refusal(tiny_fleet, host, "/nowhere", json={})[0] == httpx.codes.NOT_FOUND
    assert refusal(tiny_fleet, host, "/health", json={})[0] == httpx.codes.METHOD_NOT_ALLOWED


def test_kv_is_not_delivered_to_a_host_that_hosts_toml_does_not_name(tiny_fleet: RunningFleet) -> None:
    status, error = refusal(tiny_fleet, "tiny-prefill", "/prefill", json={**PROMPT, **DELIVERY})
    assert status == httpx.codes.BAD_REQUEST
    assert "127.0.0.1:1 is no decode host of tiny" in error["message"]


def test_a_ticket_that_the_decode_host_never_issued_is_refused(tiny_fleet: RunningFleet) -> None:
    port = tiny_fleet.fleet.hosts["tiny-decode"].kv_port
    body = {**PROMPT, "deliver": {"host": "127.0.0.1", "port": port}, "ticket": "x" * 43}
    status, error = refusal(tiny_fleet, "tiny-prefill", "/prefill", json=body)
    assert status == httpx.codes.BAD_GATEWAY
    assert error["code"] == "TicketRefused"


def test_health_with_the_token_says_what_is_served(tiny_fleet: RunningFleet) -> None:
    for host, backend in (("tiny-prefill", "transformers/cpu"), ("tiny-decode", "mlx/cpu")):
        with tiny_fleet.http(host) as http:
            health = http.get("/health").json()
        assert health["status"] == "ok" and health["loaded"] is True
        assert health["model"] == "tiny" and health["backend"] == backend
        assert health["fingerprint"]["architecture"] == "qwen3"
        assert health["versions"]
        assert all(finding["status"] == "ok" for finding in health["preflight"])


def test_a_full_queue_answers_503_with_retry_after(tiny_fleet: RunningFleet) -> None:
    """Four requests may run and eight may wait: twelve whose KV never comes leave no place for a thirteenth. Nine of
    them have a slot, the others wait for one."""
    first_lines = []
    unheld = {**PROMPT, "cache_salt": secrets.token_hex(8)}
    with contextlib.ExitStack() as stack:
        for number in range(12):
            http = stack.enter_context(tiny_fleet.http("tiny-decode"))
            answer = stack.enter_context(http.stream("POST", "/decode", json=unheld))
            lines = stack.enter_context(contextlib.closing(cast(Generator[str, None, None], answer.iter_lines())))
            # One that gets a slot may wait for a second, too, on a slow machine; those without one send nothing else.
            names = (line for line in lines if line.startswith("event: "))
            first_lines.append(next(names) if number >= 9 else next(name for name in names if name != PROGRESS))
        assert first_lines == ["event: slot"] * 9 + [PROGRESS] * 3
        with tiny_fleet.http("tiny-decode") as http:
            refused = http.post("/decode", json=unheld)
    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "Overloaded"
    wait_until(lambda: tiny_fleet.status("tiny-decode")["queue"] == 0, 60, "the abandoned slots to be freed")
