"""The certificate that callers of a gateway know: from files that change, or made once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from disagg.errors import ConfigError
from disagg.http.protocol import ConnectionBounds, Encryption
from disagg.tls import callers
from disagg.tls.callers import CertificateFiles, fingerprint, self_signed
from disagg.tls.certificate import ServerTLS, certificate, client_tls
from tests.http.served import served
from tests.tls.test_port import GET, PATIENCE_S, TOKEN, answer, scheme

NAMES = ["localhost", "127.0.0.1"]
KEPT = GET.replace(b"Connection: close\r\n", b"")


@pytest.fixture(autouse=True)
def looked_at_for_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "LOOK_S", 0.0)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return self_signed(tmp_path / "shown", NAMES)


@asynccontextmanager
async def serving(files: tuple[Path, Path]) -> AsyncIterator[int]:
    encryption = Encryption(ServerTLS(lambda: (TOKEN,), CertificateFiles(*files).context), plain=False)
    async with served(scheme, encryption, ConnectionBounds()) as port:
        yield port


def trusting(path: Path) -> ssl.SSLContext:
    """A client that trusts this certificate alone, and checks the name."""
    return ssl.create_default_context(cafile=str(path))


async def shown(port: int, name: str) -> bytes:
    """The certificate that a caller is shown who asks for this name."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    secured: ssl.SSLObject = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    return secured.getpeercert(True) or b""


def digest(path: Path) -> str:
    return fingerprint(path).replace(":", "").lower()


async def test_callers_are_shown_the_files_and_programs_of_the_fleet_its_own(files: tuple[Path, Path]) -> None:
    async with serving(files) as port:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusting(files[0]), server_hostname="localhost"
        )
        writer.write(GET)
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).endswith(b"https")
        writer.close()
        assert hashlib.sha256(await shown(port, "localhost")).hexdigest() == digest(files[0])
        assert await shown(port, client_tls(TOKEN).server_name) == certificate(TOKEN)
        plain = await answer(port, GET)
    assert plain.startswith(b"HTTP/1.1 400 ") and plain.endswith(b"this server speaks TLS: ask it by https://\n")


async def test_files_that_change_are_shown_from_then_on_and_no_connection_is_dropped(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    others = self_signed(tmp_path / "renewed", NAMES)
    async with serving(files) as port:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusting(files[0]), server_hostname="localhost"
        )
        for one, other in zip(files, others, strict=True):
            one.write_bytes(other.read_bytes())
        assert hashlib.sha256(await shown(port, "localhost")).hexdigest() == digest(others[0])
        writer.write(KEPT)
        assert await asyncio.wait_for(reader.readuntil(b"https"), PATIENCE_S)
        writer.transport.abort()


async def test_a_pair_that_does_not_fit_keeps_the_old_one_and_is_logged_once(
    files: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "disagg")
    before, others = digest(files[0]), self_signed(tmp_path / "renewed", NAMES)
    async with serving(files) as port:
        files[0].write_bytes(others[0].read_bytes())
        for _ in range(3):
            assert hashlib.sha256(await shown(port, "localhost")).hexdigest() == before
        [line] = [record.getMessage() for record in caplog.records if record.name == callers.__name__]
        assert "is not changed" in line and f"{files[1]}: this is not the key of {files[0]}" in line
        files[1].write_bytes(others[1].read_bytes())
        assert hashlib.sha256(await shown(port, "localhost")).hexdigest() == digest(others[0])
        files[0].unlink()
        assert hashlib.sha256(await shown(port, "localhost")).hexdigest() == digest(others[0])
    assert "PRIVATE" not in caplog.text


def with_password(key: Path) -> None:
    found = serialization.load_pem_private_key(key.read_bytes(), None)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.write_bytes(found.private_bytes(encoding, form, serialization.BestAvailableEncryption(b"secret")))


def of_another(key: Path) -> None:
    key.write_bytes(self_signed(key.parent / "another", NAMES)[1].read_bytes())


def of_another_kind(shown: Path) -> None:
    """OpenSSL reads it, too."""
    command = ["openssl", "x509", "-in", str(shown), "-trustout"]
    shown.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)


async def test_a_certificate_that_goes_away_while_it_is_read_changes_nothing(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, others = digest(files[0]), self_signed(tmp_path / "renewed", NAMES)

    def gone(_: Path) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    async with serving(files) as port:
        for path, other in zip(files, others, strict=True):
            path.write_bytes(other.read_bytes())
        with monkeypatch.context() as patched:
            patched.setattr(callers, "fingerprint", gone)
            assert hashlib.sha256(await shown(port, "localhost")).hexdigest() == before
    assert "is not changed" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda shown, key: shown.unlink(), "{shown}: there is no such file"),
        (lambda shown, key: key.unlink(), "{key}: there is no such file"),
        (lambda shown, key: (key.unlink(), key.mkdir()), "{key}: not a file"),
        (lambda shown, key: shown.write_text("no certificate"), "{shown}: not usable: "),
        (lambda shown, key: key.write_text("no key"), "{key}: not usable: "),
        (lambda shown, key: key.write_bytes(b" " * ((1 << 20) + 1)), "{key}: over 1048576 bytes"),
        (lambda shown, key: with_password(key), "{key}: this key has a password"),
        (lambda shown, key: of_another(key), "{key}: this is not the key"),
        (lambda shown, key: of_another_kind(shown), "{shown}: it does not begin a certificate as PEM does"),
    ],
)
def test_files_that_cannot_be_used_are_named_in_one_line(
    files: tuple[Path, Path], spoil: Callable[[Path, Path], object], message: str
) -> None:
    spoil(*files)
    with pytest.raises(ConfigError) as caught:
        CertificateFiles(*files)
    text = str(caught.value)
    assert text.startswith(message.format(shown=files[0], key=files[1])) and "\n" not in text


def test_a_certificate_that_is_made_is_kept_until_it_lacks_a_name_or_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = digest(self_signed(tmp_path, NAMES)[0])
    assert digest(self_signed(tmp_path, [*NAMES[:1], "b\u00fcro"])[0]) == first
    shown, key = self_signed(tmp_path, [*NAMES, "10.0.0.7"])
    second = digest(shown)
    assert second != first and key.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(callers, "RENEWED", callers.VALID)
    assert digest(self_signed(tmp_path, NAMES)[0]) != second


def test_the_fingerprint_is_the_one_that_openssl_prints(files: tuple[Path, Path]) -> None:
    command = ["openssl", "x509", "-in", str(files[0]), "-noout", "-fingerprint", "-sha256"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stdout.strip().partition("=")[2] == fingerprint(files[0])
