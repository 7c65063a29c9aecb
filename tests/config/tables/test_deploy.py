"""Every rule of the [deploy] table, and of the host keys that only deploying reads, broken once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.config import Deploy, load
from disagg.errors import ConfigError

Expect = Callable[[dict[str, str], str, str], ConfigError]

MODELS = '[models."qwen:30b"]'
SPARK_PORT = "port = 8000\n\n[hosts.spark.engine]"
NO_URL = "it begins with https:// or http://"


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ("«index» = 3", 'unknown key "index" in [deploy]', 'did you mean "index_url"?'),
        ("index_url = «3»", "index_url must be a string, not an integer", None),
        ('index_url = «"mirror/simple"»', "this is not a URL", NO_URL),
        ('index_url = «"ftp://mirror/simple"»', "this is not a URL", NO_URL),
        ('index_url = «"https://mirror/a b"»', "this is not a URL", NO_URL),
        ('index_url = «"https://[mirror"»', "this is not a URL", NO_URL),
        ('index_url = «"https:///simple"»', "this URL has no host name", 'as in "https://mirror.example/simple"'),
        (
            'index_url = «"https://me:secret@mirror/simple"»',
            "a password does not belong in this file",
            "put it into ~/.netrc on the hosts: pip and uv read it there",
        ),
        ('extra_index_urls = ["https://a/simple", «"/b"»]', "this is not a URL", NO_URL),
        (
            'find_links = ["/srv/wheels", «"wheels"»]',
            "this is not a URL",
            f"{NO_URL}, or the absolute path of a folder on the host",
        ),
        ('find_links = ["/a", «"/a"»]', 'find_links names "/a" twice', "keep one"),
        ('wheels = «""»', "wheels is not a path", 'as in wheels = "./wheels"'),
        ('wheels = «"a\\nb"»', "wheels is not a path", 'as in wheels = "./wheels"'),
        ("cuda_on_cpu = «1»", "cuda_on_cpu must be true or false, not an integer", "as in cuda_on_cpu = true"),
        (
            'installer = «"poetry"»',
            '"poetry" is not a value for installer',
            'one of "auto", "uv", "pip"',
        ),
    ],
)
def test_a_fault_in_the_deploy_table_is_pointed_at(
    expect_fault: Expect, table: str, message: str, hint: str | None
) -> None:
    hint = 'as in index_url = "https://mirror.example/simple"' if hint is None else hint
    expect_fault({MODELS: f"[deploy]\n{table}\n{MODELS}"}, message, hint)


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("«site_packages» = true", "site_packages needs python", 'as in python = "/usr/bin/python3"'),
        (
            "«wired_limit_mb» = 4096",
            "wired_limit_mb is for Macs",
            'it needs service = "launchd"',
        ),
        (
            'python = "/usr/bin/python3"\nsite_packages = «1»',
            "site_packages must be true or false, not an integer",
            "as in site_packages = true",
        ),
        ('service = "launchd"\nwired_limit_mb = «3»', "wired_limit_mb is out of range", "from 1024 to 16777216"),
    ],
)
def test_a_fault_in_a_host_key_for_deploying_is_pointed_at(
    expect_fault: Expect, line: str, message: str, hint: str
) -> None:
    expect_fault({SPARK_PORT: f"{line}\n{SPARK_PORT}"}, message, hint)


def test_without_the_table_nothing_is_set(tmp_path: Path, fleet_text: str) -> None:
    (tmp_path / "hosts.toml").write_text(fleet_text)
    assert load(tmp_path / "hosts.toml").deploy == Deploy()


def test_the_whole_table_is_read_and_wheels_begin_at_the_files_folder(tmp_path: Path, fleet_text: str) -> None:
    table = """
[deploy]
index_url = "https://mirror/simple"
extra_index_urls = ["http://other/simple"]
find_links = ["/srv/wheels", "https://mirror/links"]
wheels = "wheels"
installer = "uv"
cuda_on_cpu = true
"""
    (tmp_path / "hosts.toml").write_text(fleet_text + table)
    assert load(tmp_path / "hosts.toml").deploy == Deploy(
        index_url="https://mirror/simple",
        extra_index_urls=("http://other/simple",),
        find_links=("/srv/wheels", "https://mirror/links"),
        wheels=tmp_path / "wheels",
        installer="uv",
        cuda_on_cpu=True,
    )


def test_a_model_source_is_kept_as_it_stands_in_the_file(tmp_path: Path, fleet_text: str) -> None:
    (tmp_path / "hosts.toml").write_text(fleet_text)
    plain = load(tmp_path / "hosts.toml").models["plain"]
    assert plain.written == {"mlx": "./plain"}
    assert plain.sources == {"mlx": str(tmp_path / "plain")}
