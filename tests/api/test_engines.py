"""An engine is one value and one folder: a toy one is accepted, planned, fitted and run without a further line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.api.engines import ENGINES, Engine, Memory
from disagg.config import Fleet, load
from disagg.engines.simulated.decode import SimulatedDecodeEngine
from disagg.errors import ConfigError
from disagg.fleet.conditions.memory import fit, unmet
from disagg.fleet.conditions.table import engine as meets
from disagg.fleet.deploy.requirements import extras
from disagg.fleet.facts.host import HardwareFacts
from disagg.fleet.services import needs
from disagg.nvidia import GPU
from disagg.servers.run import make_service
from tests.fleet.facts.fixture_facts import facts
from tests.simulated import CONFIG, write_simulated
from tests.values import present

ROOT = Path(__file__).parents[2]
TOY = Engine(
    "toy",
    decode="toy_engine:ToyEngine",
    title="Toy",
    options=("dtype", "device", "chunk_tokens", "max_batch", "max_kv_bytes"),
    devices=("auto", "cuda"),
    systems=("Linux",),
    extras=("decode",),
    needs=("server",),
    memory=Memory("max_kv_bytes", paged=True, framework={"cuda": 3 << 30}),
)
FOLDER = """
from disagg.engines.simulated.decode import SimulatedDecodeEngine

class ToyEngine(SimulatedDecodeEngine):
    def __init__(self, source, context, options):
        super().__init__(source, context, options, "h200-sxm")
"""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The value, and the folder."""
    monkeypatch.setitem(ENGINES, "toy", TOY)
    (tmp_path / "toy_engine").mkdir()
    (tmp_path / "toy_engine" / "__init__.py").write_text(FOLDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("toy_engine", None)


def toy_fleet(folder: Path, options: str = "") -> Fleet:
    """A simulated prefill host, and a decode host with the toy engine."""
    path = write_simulated(folder)
    head, decode = path.read_text().split("[hosts.m-decode]")
    decode = decode.replace('"simulated", chunk_tokens = 512', f'"toy"{options}')
    head = head.replace("sources = {", 'sources = {toy = "./config.json", ')
    path.write_text(f"{head}[hosts.m-decode]{decode}")
    return load(path)


def test_hosts_toml_accepts_it_with_its_own_options(toy: Path) -> None:
    host = toy_fleet(toy, ', device = "cuda", max_batch = 3').hosts["m-decode"]
    assert (host.engine.name, host.engine.device, host.engine.max_batch) == ("toy", "cuda", 3)
    for option, message in (('device = "gpu"', "device"), ("threads = 2", "unknown key"), ("kv_audit = 3", "kv_audit")):
        with pytest.raises(ConfigError, match=message):
            toy_fleet(toy, f", {option}")


def test_it_is_planned_with_its_extras_and_on_its_systems(toy: Path) -> None:
    host = replace(toy_fleet(toy).hosts["m-decode"], service="systemd")
    assert (extras(host), needs(host)) == (("decode",), ("server",))
    assert [*meets(host, facts("spark_bare"))] == []
    assert "Toy runs on Linux" in [one.text for one in meets(host, facts("studio_bare"))]


def test_its_memory_is_fitted(toy: Path) -> None:
    fleet = toy_fleet(toy, ", max_kv_bytes = 8_589_934_592")
    hardware = HardwareFacts(memory=8 << 30, gpus=(GPU("NVIDIA GB10", "580.1"),))
    found = present(fit(fleet.hosts["m-decode"], fleet.models["m"], hardware, "Linux", config=CONFIG))
    assert found.need.kv == 8 << 30
    assert found.need.workspace > 3 << 30
    assert [one.text for one in unmet(found)] == [f"{found.needed}; the machine of 8.0 GiB has room for 4.0 GiB"]


async def test_it_runs(toy: Path) -> None:
    fleet = toy_fleet(toy)
    service = make_service(fleet, fleet.hosts["m-decode"])
    await service.load()
    assert isinstance(service.engine, SimulatedDecodeEngine)
    await service.close()


@pytest.mark.parametrize("name", ENGINES)
def test_the_classes_of_an_engine_are_there(name: str) -> None:
    for path in filter(None, (ENGINES[name].prefill, ENGINES[name].decode, ENGINES[name].follower)):
        module, _, named = path.partition(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert any(isinstance(one, ast.ClassDef) and one.name == named for one in ast.parse(source).body)


OTHER_MEANINGS = {
    "bench/": {"simulated"},  # a key of its JSON
    "config/convert.py": {"transformers", "vllm", "mlx"},  # what the two kinds of server in an old file were
    "extras.py": {"transformers", "vllm", "mlx"},  # packages and extras
    "gateway/": {"simulated"},  # a key of its JSON
    "planning/": {"mlx"},  # who packed the weights
    "planning/refusals.py": {"mlx"},  # who packed the weights, and who reads them
    "planning/verdicts.py": {"transformers", "vllm"},  # columns of the survey's table, and packages
}


def test_nothing_else_names_an_engine() -> None:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "disagg").rglob("*.py"):
        name = path.relative_to(ROOT / "disagg").as_posix()
        if not name.startswith("engines/") and name != "api/engines.py":
            constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            engines = {one for one in constants if isinstance(one, str) and one in ENGINES}
            meanings = [names for part, names in OTHER_MEANINGS.items() if name.startswith(part)]
            if engines := engines.difference(*meanings):
                found[name] = engines
    assert found == {}
