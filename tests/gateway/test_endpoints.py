"""disagg/gateway/endpoints.py: what other programs are given to read."""

from __future__ import annotations

import ipaddress
import json
import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from disagg.config import Fleet, GatewaySettings
from disagg.errors import UsageError
from disagg.gateway.endpoints import endpoints, render
from tests.cli.commandline import run
from tests.fleet.facts.fixture_facts import fleet, front, spark, studio

LAB = fleet(spark(), studio(), front())
HOME = replace(fleet(front(address="10.1.0.2"), studio()), name="home")


class EndpointEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One endpoint, as llm-d's plugin file-discovery reads it (github.com/llm-d/llm-d-router)."""

    name: str
    address: str
    port: str
    namespace: str = "default"
    labels: dict[str, str] = {}


class EndpointsFile(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    endpoints: list[EndpointEntry]


def test_every_gateway_of_every_fleet_is_an_endpoint() -> None:
    found = endpoints([LAB, HOME])
    assert [(one.name, one.url, one.models) for one in found] == [
        ("lab-front", "http://10.0.0.2:8080", ("qwen",)),
        ("home-front", "http://10.1.0.2:8080", ("qwen",)),
    ]


@pytest.mark.parametrize(
    ("fleets", "reason"), [([LAB, fleet(spark())], "has no gateway"), ([LAB, LAB], r"two gateways are at http")]
)
def test_a_fleet_without_a_gateway_and_one_that_is_named_twice_are_refused(fleets: list[Fleet], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        endpoints(fleets)


def test_gateways_of_fleets_with_the_same_name_have_names_of_their_own() -> None:
    """llm-d replaces an endpoint by the next one of its name."""
    twin = replace(HOME, name=LAB.name)
    assert [one.name for one in endpoints([LAB, twin])] == ["lab-front-10.0.0.2-8080", "lab-front-10.1.0.2-8080"]


def test_smg_is_started_with_all_urls_and_the_key_from_the_environment() -> None:
    words = shlex.split(render("smg", endpoints([LAB, HOME])).replace("\\\n", ""))
    at = words.index("--worker-urls")
    assert words[:2] == ["smg", "launch"]
    assert words[at + 1 : at + 3] == ["http://10.0.0.2:8080", "http://10.1.0.2:8080"]
    assert words[words.index("--api-key") + 1] == "$DISAGG_API_KEY"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "llm-d",
            'endpoints:\n  - name: "lab-front"\n    address: "10.0.0.2"\n    port: "8080"\n'
            '    labels: {model: "qwen"}\n',
        ),
        (
            "litellm",
            'model_list:\n  - model_name: "qwen"\n    litellm_params:\n      model: "openai/qwen"\n'
            '      api_base: "http://10.0.0.2:8080/v1"\n      api_key: os.environ/DISAGG_API_KEY\n',
        ),
        (
            "prometheus",
            "scrape_configs:\n  - job_name: disagg\n    authorization: {credentials_file: disagg-api-key}\n"
            '    static_configs:\n      - {targets: ["10.0.0.2:8080"], labels: {gateway: "lab-front"}}\n',
        ),
    ],
)
def test_a_form_is_what_the_other_side_reads(form: str, text: str) -> None:
    assert render(form, endpoints([LAB])) == text  # type: ignore[arg-type]  # of a parameter


def test_what_llm_d_reads_has_the_fields_of_its_endpoint_entries() -> None:
    entries = msgspec.yaml.decode(render("llm-d", endpoints([LAB, HOME])), type=EndpointsFile).endpoints
    assert len({entry.name for entry in entries}) == len(entries) == 2
    for entry in entries:
        assert ipaddress.IPv4Address(entry.address)
        assert 1 <= int(entry.port) <= 65535


def test_a_name_that_yaml_would_read_otherwise_is_quoted() -> None:
    model = replace(LAB.models["qwen"], name="yes: #1")
    of = replace(LAB, models={model.name: model})
    assert json.dumps("yes: #1") in render("litellm", endpoints([of]))


def test_llm_d_takes_only_literal_ipv4_addresses() -> None:
    named = fleet(spark(), front(address="gateway.local"))
    with pytest.raises(UsageError, match="literal IPv4 address"):
        render("llm-d", endpoints([named]))


def test_a_gateway_that_speaks_tls_is_asked_by_https() -> None:
    settings = GatewaySettings(tls_cert="/etc/gateway.pem", tls_key="/etc/gateway.key")
    home = replace(HOME, hosts={name: replace(host, settings=settings) for name, host in HOME.hosts.items()})
    gateways = endpoints([LAB, home])
    assert "--worker-urls http://10.0.0.2:8080 https://10.1.0.2:8080" in render("smg", gateways)
    assert 'api_base: "https://10.1.0.2:8080/v1"' in render("litellm", gateways)
    plain, secured = render("prometheus", gateways).split("  - job_name: disagg-tls\n")
    assert '"10.0.0.2:8080"' in plain and "scheme" not in plain
    assert secured.startswith("    scheme: https\n") and '"10.1.0.2:8080"' in secured
    with pytest.raises(UsageError, match="llm-d asks by plain HTTP, and home-front speaks TLS"):
        render("llm-d", gateways)


def test_the_command_reads_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for number, name in enumerate(("one", "two")):
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f'[fleet]\nname = "{name}"\n[models.m]\ncontext = 64\nsources.mlx = "a/b"\n'
            f'[hosts.gate]\naddress = "10.0.0.{number}"\nroles = ["gateway"]\nport = 8080\n'
        )
        files.append(path)
    assert run("gateway", "endpoints", *files, "--format", "prometheus") == 0
    out = capsys.readouterr().out
    assert '"one-gate"' in out and '"10.0.0.1:8080"' in out
