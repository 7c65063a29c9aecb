"""The rules of hosts.toml as a whole, and the two files that are shipped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg.config import Fleet, load
from disagg.errors import ConfigError, DisaggError, UnknownModel, UsageError

Expect = Callable[[dict[str, str], str, str], ConfigError]

PACKAGE = Path(disagg.__file__).parent
SHIPPED = PACKAGE.parent / "hosts.toml"
NAME_RULE = 'letters, digits, ".", "_" and "-", beginning with a letter or digit, at most 64'


def load_text(folder: Path, text: str) -> Fleet:
    path = folder / "hosts.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (
            {"[fleet]": "«nmae» = 3\n[fleet]"},
            'unknown key "nmae" in the file',
            "there are fleet, models, hosts, deploy, groups, hooks",
        ),
        ({"[hosts.spark]": "[«host».spark]"}, 'unknown key "host" in the file', 'did you mean "hosts"?'),
        ({'name = "lab"': '«nam» = "lab"'}, 'unknown key "nam" in [fleet]', 'did you mean "name"?'),
        ({'[fleet]\nname = "lab"': "«[fleet]»"}, 'missing key "name" in [fleet]', 'add name = "studio"'),
        ({'name = "lab"': "name = «3»"}, "name must be a string, not an integer", 'as in name = "studio"'),
        ({'name = "lab"': 'name = «"a lab"»'}, "this name is not usable", NAME_RULE),
        (
            {'[fleet]\nname = "lab"': 'fleet = «"lab"»'},
            "fleet must be a table, not a string",
            'as in [fleet] with name = "studio"',
        ),
        (
            {'name = "lab"': 'name = "lab"\ndefault_model = «"qwn"»'},
            'no model "qwn"',
            'did you mean "qwen"?',
        ),
        (
            {'name = "lab"': 'name = "lab"\ntoken_file = «""»'},
            "token_file is not a path",
            "",
        ),
        (
            {'name = "lab"': 'name = "lab"\ntoken_file = «3»'},
            "token_file must be a string, not an integer",
            'as in token_file = "~/.config/disagg/token"',
        ),
    ],
)
def test_a_fault_in_the_file_as_a_whole_is_pointed_at(
    expect_fault: Expect, changes: dict[str, str], message: str, hint: str
) -> None:
    expect_fault(changes, message, hint)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("", "1:1: missing table [fleet]"),
        ('[fleet]\nname = "x"\n', "1:1: missing table [models]"),
        ('[fleet]\nname = "x"\n[models]\n[hosts]\n', "3:1: no model is defined"),
        ('[fleet]\nname = "x"\n[models.a]\ncontext=1\nsources.mlx="a/b"\n', "1:1: missing table [hosts]"),
        ('[fleet]\nname = "x"\n[models.a]\ncontext=1\nsources.mlx="a/b"\n[hosts]', "6:1: no host is defined"),
    ],
)
def test_a_file_that_lacks_a_part_is_refused(tmp_path: Path, text: str, first: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert caught.value.message.splitlines()[0] == f"{tmp_path}/hosts.toml:{first}"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("token_file", "expected"),
    [("secret", "{folder}/secret"), ("./a/../b", "{folder}/b"), ("/etc/t", "/etc/t"), ("~/t", "/homes/me/t")],
)
def test_the_token_file_is_found_from_the_files_folder(
    tmp_path: Path, fleet_text: str, monkeypatch: pytest.MonkeyPatch, token_file: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/homes/me")
    fleet = load_text(tmp_path, fleet_text.replace('"lab"', f'"lab"\ntoken_file = "{token_file}"'))
    assert fleet.token_file == Path(expected.format(folder=tmp_path))


def test_without_a_token_file_there_is_none(tmp_path: Path, fleet_text: str) -> None:
    assert load_text(tmp_path, fleet_text).token_file is None


def test_the_path_of_a_fleet_is_absolute(tmp_path: Path, fleet_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load_text(tmp_path, fleet_text)
    monkeypatch.chdir(tmp_path)
    assert load(Path("hosts.toml")).path == tmp_path / "hosts.toml"


def test_hosts_and_models_keep_the_order_of_the_file(tmp_path: Path, fleet_text: str) -> None:
    fleet = load_text(tmp_path, fleet_text)
    assert list(fleet.hosts) == ["spark", "mac"]
    assert list(fleet.models) == ["qwen:30b", "plain"]


def test_the_shipped_fleet_is_the_four_machines() -> None:
    fleet = load(PACKAGE.parent / "hosts.toml")
    summary = {
        host.name: (host.url, host.roles, host.model, host.kv_port, host.connector, host.service, host.engine.name)
        for host in fleet.hosts.values()
    }
    assert summary == {
        "dgx-spark-1": (
            "https://169.254.150.103:8000", ("prefill",), "qwen3-coder:30b", None, "ssh", "systemd", "vllm",
        ),
        "dgx-spark-2": (
            "https://169.254.150.104:8000", ("prefill",), "gpt-oss:120b", None, "ssh", "systemd", "vllm",
        ),
        "mac-studio-1": (
            "https://169.254.150.101:8001", ("decode",), "gpt-oss:120b", 9001, "ssh", "launchd", "mlx",
        ),
        "mac-studio-2": ("https://169.254.150.102:8001", ("decode",), "qwen3-coder:30b", 9001, "ssh", "launchd", "mlx"),
    }  # fmt: skip
    assert (fleet.model("qwen").context, fleet.model("gpt-oss").context) == (32768, 8192)
    caches = [fleet.hosts[name].engine.kv_cache_memory_bytes for name in ("dgx-spark-1", "dgx-spark-2")]
    assert caches == [32 << 30, 8 << 30]


def test_the_demo_fleet_is_four_local_servers_on_one_thread_each() -> None:
    fleet = load(PACKAGE / "demo/hosts.toml")
    assert list(fleet.hosts) == ["prefill-1", "prefill-2", "decode-1", "decode-2"]
    for host in fleet.hosts.values():
        assert (host.address, host.connector, host.service) == ("127.0.0.1", "local", "process")
        assert (host.engine.dtype, host.engine.device, host.engine.threads) == ("float32", "cpu", 1)
    for alias, folder in (("qwen", "qwen3-moe-tiny"), ("gpt-oss", "gpt-oss-tiny")):
        model = fleet.model(alias)
        assert set(model.sources.values()) == {str(PACKAGE / "demo/models" / folder)}
        assert [len(fleet.serving(model.name, role)) for role in ("prefill", "decode")] == [1, 1]
        assert model.context == 8192


def test_configuration_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "mlx", "mlx_lm", "fabric", "paramiko", "numpy", "httpx", "rich"}
    script = "import sys, disagg.config, disagg.config.starter, disagg.config.convert; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not heavy & set(loaded.stdout.split())


@pytest.mark.parametrize(
    ("chosen", "hosts"),
    [
        ({}, ["dgx-spark-1", "dgx-spark-2", "mac-studio-1", "mac-studio-2"]),
        ({"names": ["mac-studio-2", "dgx-spark-1"]}, ["dgx-spark-1", "mac-studio-2"]),
        ({"role": "decode"}, ["mac-studio-1", "mac-studio-2"]),
        ({"model": "qwen"}, ["dgx-spark-1", "mac-studio-2"]),
        ({"role": "prefill", "model": "gpt-oss:120b"}, ["dgx-spark-2"]),
        ({"names": ["mac-*"]}, ["mac-studio-1", "mac-studio-2"]),
        ({"names": ["mac-*", "dgx-spark-2"]}, ["dgx-spark-2", "mac-studio-1", "mac-studio-2"]),
        ({"exclude": ["*-1"]}, ["dgx-spark-2", "mac-studio-2"]),
        ({"names": ["mac-*"], "exclude": ["mac-studio-2"]}, ["mac-studio-1"]),
    ],
)
def test_hosts_are_selected_by_name_role_and_model_in_file_order(chosen: dict[str, Any], hosts: list[str]) -> None:
    assert [host.name for host in load(SHIPPED).select(**chosen)] == hosts


@pytest.mark.parametrize(
    ("chosen", "kind", "message"),
    [
        ({"names": ["mac-studio-2", "x"]}, UsageError, "hosts.toml has no host x"),
        ({"role": "router"}, UsageError, '"router" is not a role'),
        ({"model": "llama"}, UnknownModel, 'no model "llama"'),
        ({"names": ["mac-studio-2"], "role": "prefill"}, UsageError, "fits these options"),
        ({"names": ["linux-*"]}, UsageError, "hosts.toml has no host linux-"),
        ({"exclude": ["x"]}, UsageError, "hosts.toml has no host x"),
        ({"exclude": ["*"]}, UsageError, "fits these options"),
        ({"groups": ["rack"]}, UsageError, "hosts.toml has no groups"),
    ],
)
def test_a_selection_without_hosts_is_an_error(chosen: dict[str, Any], kind: type[DisaggError], message: str) -> None:
    with pytest.raises(kind, match=message):
        load(SHIPPED).select(**chosen)


def test_a_group_names_hosts_and_patterns_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(SHIPPED.read_text() + '\n[groups]\nmacs = ["mac-*"]\nfirst = ["dgx-spark-1", "mac-studio-1"]\n')
    fleet = load(path)

    def names(**chosen: Any) -> list[str]:
        return [host.name for host in fleet.select(**chosen)]

    assert names(groups=["macs"]) == ["mac-studio-1", "mac-studio-2"]
    assert names(groups=["macs", "first"]) == ["dgx-spark-1", "mac-studio-1", "mac-studio-2"]
    assert names(groups=["first"], role="decode") == ["mac-studio-1"]
    assert names(groups=["first"], exclude=["mac-*"]) == ["dgx-spark-1"]
    with pytest.raises(UsageError, match="no group linux"):
        names(groups=["linux"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('macs = ["linux-*"]', 'no host fits "linux-*"'),
        ('macs = "mac-*"', "macs must be a list"),
        ('"a b" = ["mac-*"]', "this name is not usable"),
    ],
)
def test_a_group_of_no_host_is_an_error_that_points_at_it(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(f"{SHIPPED.read_text()}\n[groups]\n{line}\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert message in error.value.message
