"""What hosts.toml has for two kinds of hosts beside what all have: gateways, and hosts with several models."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Final
from urllib.parse import quote

MAX_SLUG: Final = 200
"""Characters of a file's name, of the 255 bytes that systems allow."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What a gateway offers its clients.

    cors_origins: of the web pages that may ask it; "*": of all, if they have a key. tls_cert, tls_key: files on its
    machine with its certificate and key, both or none. tls_self_signed: it makes and keeps a certificate of its own.
    keep_responses: so many responses of /v1/responses are kept for the requests that follow them.
    """

    cors_origins: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_self_signed: bool = False
    keep_responses: int = 0

    @property
    def tls(self) -> bool:
        """Whether its clients speak TLS."""
        return self.tls_cert is not None or self.tls_self_signed


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """What the keeper of a host with several models goes by.

    ports: of the models' processes. preload: loaded at start. pin: never evicted, never unloaded for being idle.
    max_loaded: so many models at a time; None: as many as fit. idle_ttl_s: how long a model stays after its last
    request; None: until its memory is needed. min_stay_s: how long one that has just been loaded stays at least.
    memory_bytes: budget of this host's models; None: what the machine has room for.
    """

    ports: range
    preload: tuple[str, ...] = ()
    pin: tuple[str, ...] = ()
    max_loaded: int | None = None
    idle_ttl_s: float | None = None
    min_stay_s: float = 30.0
    memory_bytes: int | None = None


def slug(name: str) -> str:
    """The name of a model, or HOST/MODEL, as that of a file, with room for an ending."""
    text = quote(name, safe="")
    if len(text) <= MAX_SLUG:
        return text
    return f"{text[: MAX_SLUG - 17]}-{sha256(name.encode()).hexdigest()[:16]}"
