"""A certificate that callers of a gateway know, in files: read anew when the files change, or made once.

Whoever renews it may write the two files one after the other: until both fit, the last pair that did is shown. Running
connections keep what they have begun with.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import ssl
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from disagg.errors import ConfigError
from disagg.files import replace_file

LOOK_S: Final = 1.0
"""How often the files are looked at, at most."""
MAX_BYTES: Final = 1 << 20
VALID: Final = timedelta(days=800)
"""Of a certificate that is made here. Apple's systems refuse more than 825 days."""
RENEWED: Final = timedelta(days=30)
"""Before its end it is made anew."""

log = logging.getLogger(__name__)

State = tuple[tuple[int, int, int] | None, ...]


class CertificateFiles:
    """A certificate with its chain, and its key, both in PEM. Raises ConfigError if they cannot be used now; later a
    pair that cannot be used is logged once."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self._state, self._looked = self._look(), time.monotonic()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context of a new connection."""
        if (now := time.monotonic()) - self._looked >= LOOK_S:
            self._looked = now
            if (state := self._look()) != self._state:
                self._state = state
                self._reload()
        return self._context

    def _reload(self) -> None:
        try:
            context, shown = self._load(), fingerprint(self._certificate)
        except (ConfigError, OSError, ValueError) as error:  # the file may change again in between
            log.error("the TLS certificate is not changed: %s", error)
        else:
            self._context = context
            log.info("the TLS certificate was read anew: SHA-256 %s", shown)

    def _look(self) -> State:
        return tuple(_state(path) for path in (self._certificate, self._key))

    def _load(self) -> ssl.SSLContext:
        for path in (self._certificate, self._key):
            _require_readable(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0  # connections are kept open instead of sessions
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except _Encrypted:
            raise ConfigError(f"{self._key}: this key has a password", "name a key without one") from None
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(self._fault(error), "name a certificate and its own key, both in PEM") from None
        if not _has_certificate(self._certificate):  # OpenSSL reads other kinds, too
            raise ConfigError(f"{self._certificate}: it does not begin a certificate as PEM does", "write it in PEM")
        return context

    def _fault(self, error: OSError) -> str:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            return f"{self._key}: this is not the key of {self._certificate}"
        wrong = self._key if _has_certificate(self._certificate) else self._certificate
        return f"{wrong}: not usable: {getattr(error, 'reason', None) or error.strerror or error}"


def fingerprint(certificate: Path) -> str:
    """The SHA-256 of a certificate as browsers show it."""
    first = _pem(certificate.read_text("ascii", "replace"))
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest().upper()
    return ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))


def self_signed(folder: Path, names: Sequence[str]) -> tuple[Path, Path]:
    """A certificate for these names and addresses that signs itself, and its key. Those in the folder are kept as long
    as they are valid and have all the names. Names that are not ASCII are left out: a certificate has none. Raises
    ConfigError if they cannot be written."""
    names = [name for name in names if name.isascii()]
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    try:
        if not _fits(certificate, key, names):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            made, secret = _made(names)
            replace_file(key, secret)
            replace_file(certificate, made, 0o644)
    except OSError as error:
        raise ConfigError(f"{folder}: no certificate can be written: {error.strerror or error}") from error
    return certificate, key


def _fits(certificate: Path, key: Path, names: Sequence[str]) -> bool:
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        secret = serialization.load_pem_private_key(key.read_bytes(), None)
        stated = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    known = {*stated.get_values_for_type(x509.DNSName), *map(str, stated.get_values_for_type(x509.IPAddress))}
    valid = found.not_valid_after_utc - datetime.now(UTC) > RENEWED
    return valid and {*names} <= known and secret.public_key() == found.public_key()


def _made(names: Sequence[str]) -> tuple[bytes, bytes]:
    """A new certificate and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "disagg gateway")])
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([_named(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return made.public_bytes(encoding), key.private_bytes(encoding, form, serialization.NoEncryption())


def _named(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _state(path: Path) -> tuple[int, int, int] | None:
    """What tells a file that has changed, also if it is a link that leads to another one; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _require_readable(path: Path) -> None:
    """Raises ConfigError for what is no file that this program may read whole."""
    try:
        if not path.is_file():
            fault = "not a file" if path.exists() else "there is no such file"
            raise ConfigError(f"{path}: {fault}", "name a file in PEM")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: over {MAX_BYTES} bytes", "name a file in PEM")
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _has_certificate(path: Path) -> bool:
    try:
        ssl.PEM_cert_to_DER_cert(_pem(path.read_text("ascii", "replace")))
    except (OSError, ValueError):
        return False
    return True


def _pem(text: str) -> str:
    """The first certificate of a chain."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    _, found, rest = text.partition(begin)
    return f"{found}{rest.partition(end)[0]}{end}\n"


class _Encrypted(Exception):
    """A key needs a password, which nobody is asked for."""


def _no_password() -> bytes:
    raise _Encrypted
