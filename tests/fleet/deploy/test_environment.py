"""Which python environment a host gets, and what is said where it can have none."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Deploy, Host
from disagg.fleet.deploy.environment import Environment, environment
from disagg.fleet.deploy.requirements import locked_packages
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.host import HostFacts, Python
from tests.fleet.facts.fixture_facts import NEEDS, facts, spark, studio

UV = "/home/nvidia/.local/bin/uv"


def made(host: Host, found: HostFacts, deploy: Deploy | None = None) -> Environment:
    result = environment(host, deploy or Deploy(), found, NEEDS)
    assert isinstance(result, Environment), result
    return result


def refused(host: Host, found: HostFacts, deploy: Deploy | None = None) -> Refusal:
    result = environment(host, deploy or Deploy(), found, NEEDS)
    assert isinstance(result, Refusal)
    return result


def pythons(*versions: tuple[int, int, int], makes_venvs: bool = True) -> tuple[Python, ...]:
    return tuple(Python(f"/usr/bin/python{a}.{b}", (a, b, c), makes_venvs) for a, b, c in versions)


def test_requirements_are_those_of_the_role_on_the_hosts_platform() -> None:
    assert made(spark(), facts("spark_bare")).requirements == ("anyio>=4.5", "torch>=2.6")
    assert made(studio(), facts("studio_bare")).requirements == ("anyio>=4.5", "mlx>=0.32.4")
    assert made(studio(), facts("spark_bare")).requirements == ("anyio>=4.5", "mlx[cpu]>=0.32.4")


def test_what_is_really_declared_can_be_read() -> None:
    from disagg.fleet.deploy.requirements import installed_requirements, marker_environment, requirements

    target = marker_environment(facts("spark_bare"), None)
    lines = requirements(("prefill",), installed_requirements().declared, target)
    assert any(line.startswith("torch") for line in lines)
    assert not any(line.startswith(("mlx", "pytest")) for line in lines)
    assert "torch==" in installed_requirements().locked


def test_the_usual_choice_is_the_python_that_frameworks_have_wheels_for() -> None:
    found = facts("spark_bare", pythons=pythons((3, 14, 0), (3, 11, 2), (3, 12, 3), (3, 10, 1)))
    assert made(spark(), found).version == "3.12"


def test_an_environment_that_is_there_is_kept_when_another_python_appears() -> None:
    before = facts("spark_bare", pythons=pythons((3, 11, 2)))
    there = made(spark(), before).hash
    after = facts("spark_bare", pythons=pythons((3, 12, 3), (3, 11, 2)), environments={there: True})
    assert made(spark(), after).hash == there


def test_uv_installs_where_it_is_there_and_fetches_python_where_that_is_missing() -> None:
    assert made(spark(), facts("spark_bare", uv=UV)).uv == UV
    assert made(spark(), facts("spark_bare", uv=UV), Deploy(installer="pip")).uv == ""
    fetched = made(spark(), facts("spark_bare", uv=UV, pythons=pythons((3, 8, 1))))
    assert (fetched.python, fetched.version) == (None, "3.12")


def test_what_installs_does_not_change_the_environments_name() -> None:
    assert made(spark(), facts("spark_bare", uv=UV)).hash == made(spark(), facts("spark_bare")).hash


def test_its_name_changes_with_all_that_changes_its_content() -> None:
    found = facts("spark_bare")
    own = replace(spark(), python="/opt/nv/python")
    with_own = facts("spark_bare", pythons=(Python("/opt/nv/python", (3, 12, 3), configured=True),))
    mirror = Deploy(index_url="https://mirror/simple")
    variants = [
        made(spark(), found),
        made(spark(), found, mirror),
        made(spark(), found, replace(mirror, find_links=("/srv/wheels",))),
        made(spark(), facts("spark_bare", pythons=pythons((3, 13, 0)))),
        made(own, with_own),
        made(replace(own, site_packages=True), with_own),
        made(spark(), facts("spark_bare", arch="x86_64")),
        replace(made(spark(), found), locked=locked_packages("torch==2.14.0\n")),
        replace(made(spark(), found), requirements=("anyio>=5",)),
    ]
    assert len({one.hash for one in variants}) == len(variants)


def test_index_settings_become_options_of_the_installer() -> None:
    deploy = Deploy("https://a/simple", ("https://b/simple",), ("/srv/wheels",))
    assert made(spark(), facts("spark_bare"), deploy).options == (
        "--index-url", "https://a/simple", "--extra-index-url", "https://b/simple", "--find-links", "/srv/wheels",
    )  # fmt: skip


def test_an_index_without_encryption_is_trusted_because_hosts_toml_names_it() -> None:
    deploy = Deploy("http://mirror.lab:8080/simple", ("https://b/simple",), ("http://mirror.lab:8080/wheels",))
    options = made(spark(), facts("spark_bare"), deploy).options
    assert options[-2:] == ("--trusted-host", "mirror.lab:8080")
    assert options.count("--trusted-host") == 1, "b is reached by https, and its certificate is checked"


@pytest.mark.parametrize(
    ("host", "changes", "deploy", "cause", "hint"),
    [
        (spark(), {"pythons": ()}, Deploy(), "there is no Python 3.11 or newer", "sudo apt install python3"),
        (spark(), {"pythons": (), "os": "Darwin"}, Deploy(), "there is no Python 3.11", "brew install python@3.12"),
        (
            spark(),
            {"pythons": pythons((3, 8, 10))},
            Deploy(),
            "every Python there is older than 3.11: /usr/bin/python3.8 is 3.8.10",
            "uv",
        ),
        (
            spark(),
            {"pythons": pythons((3, 12, 3), makes_venvs=False)},
            Deploy(),
            "/usr/bin/python3.12 has no venv module",
            "sudo apt install python3.12-venv",
        ),
        (spark(), {}, Deploy(installer="uv"), "there is no uv", 'installer = "auto"'),
        (spark(python="/opt/x"), {"no_python": "/opt/x"}, Deploy(), "/opt/x does not run there", "correct `python`"),
        (
            spark(python="/opt/x"),
            {"pythons": (Python("/opt/x", (3, 10, 2), configured=True),)},
            Deploy(),
            "/opt/x is Python 3.10.2, and disagg needs 3.11",
            "a newer one",
        ),
        (
            spark(python="/opt/x"),
            {"pythons": (Python("/opt/x", (3, 12, 2), False, True),)},
            Deploy(),
            "/opt/x has no venv module",
            "python3.12-venv",
        ),
    ],
)
def test_a_host_without_a_usable_python_is_refused_with_its_mend(
    host: Host, changes: dict[str, Any], deploy: Deploy, cause: str, hint: str
) -> None:
    refusal = refused(host, facts("spark_bare", **changes), deploy)
    assert cause in refusal.cause
    assert hint in refusal.hint


def test_hosts_of_one_machine_share_an_environment_of_local_wheels(tmp_path: Path) -> None:
    for name in ("anyio-4.16.0", "torch-2.13.0"):
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\n")
    found = facts("spark_bare")
    hosts = [(spark(name=name), replace(found, host=name)) for name in ("a", "b")]
    first, second = (made(host, there, Deploy(wheels=tmp_path)) for host, there in hosts)
    assert len(first.wheels) == 2 and first.hash == second.hash


def test_missing_wheels_are_named_with_the_kind_of_machine_they_are_for(tmp_path: Path) -> None:
    refusal = refused(spark(), facts("spark_bare"), Deploy(wheels=tmp_path))
    assert f"{tmp_path} has no wheel of anyio==4.16.0, torch==2.13.0 for cp312 on linux aarch64" in refusal.cause
    assert "pip download -d wheels -c disagg/fleet/constraints.txt '.[prefill]'" in refusal.hint
    assert refusal.hint.endswith(f"copy them to {tmp_path}")
