"""The keys of a gateway's table that are about its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from disagg.config.addresses import origin_fault
from disagg.config.document import on_one_line
from disagg.config.schema import GatewaySettings
from disagg.config.table import Table
from disagg.config.tables.engine import Reader, absolute_path, within

MAX_RESPONSES: Final = 10_000
"""The most responses that a gateway keeps."""


def read_settings(table: Table) -> GatewaySettings:
    """What the gateway of this table offers its clients."""
    settings = GatewaySettings(**{key: reader(table, key) for key, reader in GATEWAY_OPTIONS.items() if key in table})
    for key, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if key in table and other not in table:
            raise table.fault_at_key(key, f"{key} needs {other}", "name both, or none")
    if settings.tls_self_signed and settings.tls_cert:
        raise table.fault_at_key("tls_self_signed", "there is a certificate already: tls_cert", "remove one of the two")
    return settings


def _origins(table: Table, key: str) -> tuple[str, ...]:
    origins = table.strings(key, 'cors_origins = ["https://chat.example.org"]')
    for index, origin in enumerate(origins):
        if hint := origin_fault(origin):
            raise table.fault_at_element(key, index, f'"{on_one_line(origin)}" is not an origin', hint)
    return origins


GATEWAY_OPTIONS: Final[Mapping[str, Reader]] = {
    "cors_origins": _origins,
    "tls_cert": absolute_path("/etc/ssl/gateway.pem", "a file on the gateway's machine"),
    "tls_key": absolute_path("/etc/ssl/gateway.key", "a file on the gateway's machine"),
    "tls_self_signed": lambda table, key: table.boolean(key),
    "keep_responses": within(0, MAX_RESPONSES),
}
