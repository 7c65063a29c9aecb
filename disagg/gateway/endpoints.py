"""The configuration of routers and monitors in front of gateways, made from hosts.toml. Pure."""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from disagg.config import Fleet
from disagg.errors import UsageError

Form = Literal["smg", "llm-d", "litellm", "prometheus"]
KEY_VARIABLE: Final = "DISAGG_API_KEY"
"""The environment variable in which the other side finds its key of the gateways."""


@dataclass(frozen=True, slots=True)
class GatewayEndpoint:
    """One gateway. name: unique among all of them. models: that it serves."""

    name: str
    address: str
    port: int
    url: str
    models: tuple[str, ...]


def endpoints(fleets: Sequence[Fleet]) -> list[GatewayEndpoint]:
    """The gateways of these fleets. Raises UsageError for a fleet without one, and for two with the same address."""
    hosts = [(fleet, host) for fleet in fleets for host in fleet.hosts.values() if host.gateway]
    names = Counter(f"{fleet.name}-{host.name}" for fleet, host in hosts)
    found = []
    for fleet, host in hosts:
        name = f"{fleet.name}-{host.name}"
        if names[name] > 1:  # fleets of one name: llm-d keeps one endpoint of each name
            name = f"{name}-{host.address}-{host.port}"
        found.append(GatewayEndpoint(name, host.address, host.port, host.url, tuple(fleet.models)))
    for fleet in fleets:
        if not any(host.gateway for host in fleet.hosts.values()):
            raise UsageError(f"{fleet.path} has no gateway", 'add a host with roles = ["gateway"]')
    urls = [one.url for one in found]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise UsageError(f"two gateways are at {twice}", "name each hosts.toml once")
    return found


def render(form: Form, gateways: Sequence[GatewayEndpoint]) -> str:
    """The text of the other side's configuration. Raises UsageError if it cannot express a gateway."""
    return _FORMS[form](gateways)


def _smg(gateways: Sequence[GatewayEndpoint]) -> str:
    """smg reads the models from each worker's GET /v1/models, for which it sends the key."""
    urls = " ".join(one.url for one in gateways)
    return (
        f"smg launch --worker-urls {urls} \\\n"
        f'    --policy cache_aware --host 127.0.0.1 --port 30000 --api-key "${KEY_VARIABLE}"\n'
    )


def _llm_d(gateways: Sequence[GatewayEndpoint]) -> str:
    """The file of llm-d's plugin file-discovery. Addresses are literal IPv4, ports are text."""
    lines = ["endpoints:"]
    for one in gateways:
        if not _is_ipv4(one.address):
            raise UsageError(
                f"llm-d needs a literal IPv4 address, and {one.name} has {one.address}", "give its host one"
            )
        if one.url.startswith("https:"):
            raise UsageError(f"llm-d asks by plain HTTP, and {one.name} speaks TLS", "remove tls_... from its host")
        lines += [
            f"  - name: {_text(one.name)}",
            f"    address: {_text(one.address)}",
            f"    port: {_text(str(one.port))}",
        ]
        if len(one.models) == 1:
            lines.append(f"    labels: {{model: {_text(one.models[0])}}}")
    return "\n".join(lines) + "\n"


def _litellm(gateways: Sequence[GatewayEndpoint]) -> str:
    """One entry per gateway and model: LiteLLM balances entries of one name."""
    lines = ["model_list:"]
    for one in gateways:
        for model in one.models:
            lines += [
                f"  - model_name: {_text(model)}",
                "    litellm_params:",
                f"      model: {_text(f'openai/{model}')}",
                f"      api_base: {_text(f'{one.url}/v1')}",
                f"      api_key: os.environ/{KEY_VARIABLE}",
            ]
    return "\n".join(lines) + "\n"


def _prometheus(gateways: Sequence[GatewayEndpoint]) -> str:
    """Prometheus reads no environment: its key is in a file."""
    lines = ["scrape_configs:"]
    for scheme, job in (("http", "disagg"), ("https", "disagg-tls")):
        start = f"{scheme}://"
        if not (named := {one.url.removeprefix(start): one.name for one in gateways if one.url.startswith(start)}):
            continue
        lines += [f"  - job_name: {job}", *(["    scheme: https"] if scheme == "https" else [])]
        lines += ["    authorization: {credentials_file: disagg-api-key}", "    static_configs:"]
        for target, name in named.items():
            lines.append(f"      - {{targets: [{_text(target)}], labels: {{gateway: {_text(name)}}}}}")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """A string of JSON is one of YAML."""
    return json.dumps(text)


def _is_ipv4(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 4
    except ValueError:
        return False


_FORMS: Final[Mapping[Form, Callable[[Sequence[GatewayEndpoint]], str]]] = {
    "smg": _smg,
    "llm-d": _llm_d,
    "litellm": _litellm,
    "prometheus": _prometheus,
}
