"""A short name for what hosts.toml says about a host that its server heeds, the same on every machine."""

from __future__ import annotations

import hashlib

from disagg.config.render import KEPT
from disagg.config.schema import Fleet, Host


def served_digest(fleet: Fleet, host: Host) -> str:
    """12 hexadecimal digits. Model sources do not count: the same model lies elsewhere on another machine, and its
    fingerprint tells whether it is the same."""
    own = [(name, getattr(host, name)) for name in sorted(KEPT)]
    model = fleet.models[host.model]
    said = repr((host.name, own, host.engine, model.name, model.context, model.aliases))
    return hashlib.sha256(said.encode()).hexdigest()[:12]
