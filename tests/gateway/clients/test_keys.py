"""Keys on disk, and what they allow."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.requests import Request

from disagg.config.addresses import is_loopback
from disagg.errors import ConfigError, DisaggError, Overloaded, Unauthorized, UsageError
from disagg.gateway.clients.access import Access, require_keys_if_public
from disagg.gateway.clients.keys import Key, KeyFile, KeyRing, joined
from disagg.gateway.clients.limits import Bucket, KeyLimits


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "state" / "keys.json")


def request(**headers: str) -> Request:
    named = {"host": "127.0.0.1:8080", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Request({"type": "http", "headers": [(name.encode(), value.encode()) for name, value in named.items()]})


def test_the_file_holds_no_secret_and_is_its_owner_s_alone(file: KeyFile) -> None:
    secret = file.add("editor", models=["m"], requests_per_minute=5)
    assert secret.startswith("sk-disagg-") and len(secret) > 50
    assert secret not in file.path.read_text()
    assert file.path.stat().st_mode & 0o777 == 0o600
    [key] = file.read()
    assert (key.name, key.models, key.requests_per_minute, key.tokens_per_minute) == ("editor", ("m",), 5, None)


def test_a_running_gateway_sees_a_key_that_is_added_and_one_that_is_revoked(file: KeyFile) -> None:
    ring = KeyRing(file)
    assert ring.empty and not ring.usable
    secret = file.add("editor")
    found = ring.find(secret)
    assert found is not None and found.name == "editor"
    assert ring.find(secret + "x") is None
    file.revoke("editor")
    assert ring.find(secret) is None
    assert not ring.empty and not ring.usable


@pytest.mark.parametrize("name", ["", "x" * 65, "editor\x1b[2J"])
def test_a_name_that_would_damage_the_file_or_a_terminal_is_refused(name: str, file: KeyFile) -> None:
    secret = file.add("x" * 64)
    with pytest.raises(UsageError, match="1 to 64 printable characters"):
        file.add(name)
    assert KeyRing(file).find(secret) is not None


def test_a_name_can_be_used_again_once_its_key_is_revoked(file: KeyFile) -> None:
    file.add("editor")
    with pytest.raises(UsageError, match="there is a key named editor"):
        file.add("editor")
    file.revoke("editor")
    file.add("editor")
    assert [key.revoked is None for key in file.read()] == [False, True]


def test_a_key_that_does_not_exist_cannot_be_revoked(file: KeyFile) -> None:
    file.add("editor")
    with pytest.raises(UsageError, match="no key named chat") as caught:
        file.revoke("chat")
    assert caught.value.hint == "there are: editor"


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [("{", 0o600, "damaged"), ('{"keys": [{"id": 1}]}', 0o600, "damaged"), ('{"keys": []}', 0o622, "other users")],
)
def test_a_file_that_cannot_be_trusted_lets_nobody_in(file: KeyFile, text: str, mode: int, reason: str) -> None:
    secret = file.add("editor")
    ring = KeyRing(file)
    assert ring.find(secret) is not None
    file.path.write_text(text)
    file.path.chmod(mode)
    with pytest.raises(ConfigError, match=reason):
        ring.find(secret)
    with pytest.raises(DisaggError, match="cannot read its keys"):
        Access(ring, public=False).key(request())


def test_a_file_that_cannot_be_read_is_logged_once_and_not_for_every_request(
    file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    secret = file.add("editor")
    access, good = Access(KeyRing(file), public=False), file.path.read_text()
    for text in ("{", good, "{"):
        file.path.write_text(text)
        for _ in range(3):
            with suppress(DisaggError):
                access.key(request(authorization=f"Bearer {secret}"))
    assert caplog.text.count("is damaged") == 2


def test_keys_that_were_brought_without_their_marker_are_required_for_good(file: KeyFile) -> None:
    file.add("editor")
    file.path.with_suffix(".required").unlink()
    assert not KeyRing(file).empty
    file.path.unlink()
    assert not KeyRing(file).empty


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer"])
def test_the_scheme_of_a_key_may_be_written_in_any_case(file: KeyFile, scheme: str) -> None:
    secret = file.add("editor")
    assert Access(KeyRing(file), public=True).key(request(authorization=f"{scheme} {secret}")) is not None


def test_without_keys_programs_of_this_machine_need_none(file: KeyFile) -> None:
    access = Access(KeyRing(file), public=False)
    assert access.key(request()) is None
    assert access.key(request(host="localhost:8080", origin="http://localhost:3000")) is None
    local = {"origin": "http://localhost:3000", "sec-fetch-site": "cross-site"}  # localhost is not the site 127.0.0.1
    assert access.key(request(**local)) is None
    assert access.key(request(host="[::1]:8080", origin="vscode-webview://abc")) is None
    assert access.key(request(host="LOCALHOST", origin="http://[::1]:3000")) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://example.org"},
        {"origin": "null"},
        {"host": "example.org:8080"},
        {"host": ""},
        {"host": "["},
        {"host": "localhost#.example.org"},
        {"host": "localhost?.example.org"},
        {"host": "localhost@example.org"},
        {"host": "localhost:80:80"},
        {"host": "localhost."},
        {"host": "127.0.0.1.example.org"},
        {"host": "[::1%25lo]"},
        {"origin": "http://["},
        {"origin": "http://localhost#.example.org"},
        {"origin": "HTTP://example.org"},
        {"origin": "http:localhost@example.org"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_without_keys_a_web_page_cannot_use_the_gateway(file: KeyFile, headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        Access(KeyRing(file), public=False).key(request(**headers))


def test_a_gateway_that_other_machines_can_reach_always_needs_a_key(file: KeyFile) -> None:
    ring = KeyRing(file)
    with pytest.raises(UsageError, match=r"--host 0\.0\.0\.0"):
        require_keys_if_public("0.0.0.0", ring)
    require_keys_if_public("127.0.0.1", ring)
    with pytest.raises(Unauthorized):
        Access(ring, public=True).key(request())
    secret = file.add("editor")
    require_keys_if_public("0.0.0.0", ring)
    access = Access(ring, public=True)
    for headers in ({"authorization": f"Bearer {secret}"}, {"x_api_key": secret}):
        key = access.key(request(**headers, host="gateway.example"))
        assert key is not None and key.name == "editor"


def test_a_running_gateway_whose_keys_are_lost_lets_nobody_in(file: KeyFile) -> None:
    access = Access(KeyRing(file), public=False)
    secret = file.add("editor")
    bearer = request(authorization=f"Bearer {secret}")
    assert access.key(bearer) is not None
    for path in file.path.parent.iterdir():
        path.unlink()
    for one in (request(), bearer):
        with pytest.raises(Unauthorized):
            access.key(one)


def test_a_gateway_that_starts_after_its_keys_were_lost_lets_nobody_in(file: KeyFile) -> None:
    file.add("editor")
    file.path.unlink()
    with pytest.raises(Unauthorized):
        Access(KeyRing(file), public=False).key(request())


def test_revoking_the_last_key_opens_nothing(file: KeyFile) -> None:
    access = Access(KeyRing(file), public=False)
    assert access.key(request()) is None
    file.add("editor")
    file.revoke("editor")
    with pytest.raises(Unauthorized, match="no API key was sent"):
        access.key(request())


def test_a_refusal_tells_no_key_from_a_wrong_one_and_its_hint_can_be_followed(file: KeyFile) -> None:
    file.add("editor")
    access = Access(KeyRing(file), public=False)
    for headers, message in (({}, "no API key was sent"), ({"x_api_key": "sk-other"}, "wrong or revoked")):
        with pytest.raises(Unauthorized, match=message) as refused:
            access.key(request(**headers))
        assert "disagg keys add NAME" in refused.value.hint


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.0.0.2", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_addresses(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_a_bucket_gives_a_minute_s_share_at_once_and_then_as_it_fills() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 0.5) == pytest.approx(0.5)
    assert bucket.wait_s(1, 1.0) == 0
    bucket.take(31, 1.0)
    assert bucket.wait_s(1, 1.0) == pytest.approx(31.0)
    bucket.take(0, 1000.0)
    bucket.take(60, 1000.0)
    assert bucket.wait_s(1, 1000.0) == pytest.approx(1.0), "an idle hour saves up one minute's share"


def test_requests_over_a_key_s_limit_are_refused_with_the_time_to_try_again() -> None:
    limits, key = KeyLimits(), made(requests_per_minute=2)
    limits.admit(key, 1, 0.0)
    limits.admit(key, 1, 0.0)
    with pytest.raises(Overloaded, match="2 requests per minute") as caught:
        limits.admit(key, 1, 0.0)
    assert caught.value.retry_after_s == 30
    limits.admit(key, 1, 30.0)
    limits.admit(made(id="other", requests_per_minute=2), 1, 0.0)


def test_each_answer_that_a_request_asks_for_counts() -> None:
    limits, key = KeyLimits(), made(requests_per_minute=4)
    limits.admit(key, 3, 0.0)
    with pytest.raises(Overloaded, match="4 requests per minute") as caught:
        limits.admit(key, 2, 0.0)
    assert caught.value.retry_after_s == 15
    limits.admit(key, 1, 0.0)


def test_a_request_for_more_answers_than_a_minute_s_share_waits_for_a_full_share_and_delays_the_next() -> None:
    limits, key = KeyLimits(), made(requests_per_minute=2)
    limits.admit(key, 4, 0.0)
    with pytest.raises(Overloaded) as caught:
        limits.admit(key, 1, 0.0)
    assert caught.value.retry_after_s == 90


def test_tokens_that_were_used_delay_the_next_request() -> None:
    limits, key = KeyLimits(), made(tokens_per_minute=100)
    limits.admit(key, 1, 0.0)
    limits.spend(key, 199, 0.0)
    with pytest.raises(Overloaded, match="100 tokens per minute") as caught:
        limits.admit(key, 1, 0.0)
    assert caught.value.retry_after_s == 60
    limits.admit(key, 1, 60.0)


def test_a_request_that_is_refused_for_its_tokens_does_not_count_as_one() -> None:
    limits, key = KeyLimits(), made(requests_per_minute=1, tokens_per_minute=1)
    limits.spend(key, 1, 0.0)
    with pytest.raises(Overloaded, match="tokens"):
        limits.admit(key, 1, 0.0)
    limits.admit(key, 1, 60.0)


def test_a_key_survives_json() -> None:
    key = made(models=("m",), tokens_per_minute=3)
    assert Key.from_json(json.loads(json.dumps(key.to_json()))) == key


def made(id: str = "k", **fields: object) -> Key:
    return Key.from_json({"id": id, "name": "editor", "sha256": "", "created": 0.0, **fields})


def key(id: str, created: float, revoked: float | None = None) -> Key:
    return Key(id=id, name=f"key {id}", sha256=id * 64, created=created, revoked=revoked)


@pytest.mark.parametrize(
    ("files", "together"),
    [
        ([], ()),
        ([(), ()], ()),
        ([(key("b", 2.0),), (key("a", 1.0), key("b", 2.0))], (key("a", 1.0), key("b", 2.0))),
        ([(key("a", 1.0),), (key("a", 1.0, revoked=3.0),)], (key("a", 1.0, revoked=3.0),)),
        ([(key("a", 1.0, revoked=3.0),), (key("a", 1.0),)], (key("a", 1.0, revoked=3.0),)),
    ],
)
def test_keys_of_several_files_are_joined_and_a_revoked_one_stays_revoked(
    files: list[tuple[Key, ...]], together: tuple[Key, ...]
) -> None:
    assert joined(files) == together


def test_a_file_without_keys_that_is_joined_with_none_is_not_made(file: KeyFile) -> None:
    assert file.join([()]) == () and not file.path.exists() and not file.required
    assert file.join([(key("a", 1.0),)]) == file.read() == (key("a", 1.0),)
    assert file.required
