"""Hosts with several models: every rule of their keys, broken once, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Fleet, KeeperSettings, load, served_digest, slug
from disagg.config.render import render
from disagg.errors import ConfigError

Expect = Callable[[dict[str, str], str, str], ConfigError]
Change = Callable[[Mapping[str, str]], Fleet]

MAC = 'model = "qwen:30b"\nport = 8001\nkv_port = 9001'
MODELS = 'models = ["qwen:30b", "plain"]'
PORTS = 'ports = "8100-8131"'
SEVERAL = f"{MODELS}\nport = 8001\n{PORTS}"
MAC_ENGINE = 'engine.name = "mlx"'
PLAIN = "[models.plain]\ncontext = 64"
SPARK = 'model = "qwen:30b"\nport = 8000\n'


@pytest.fixture
def changed(tmp_path: Path, fleet_text: str) -> Change:
    """The fleet of a text in which each old part is replaced by a new one."""

    def load_changed(changes: Mapping[str, str]) -> Fleet:
        text = fleet_text
        for old, new in changes.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / "hosts.toml").write_text(text)
        return load(tmp_path / "hosts.toml")

    return load_changed


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        (
            f'{MODELS}\n«model» = "plain"\nport = 8001\n{PORTS}',
            "a host with models has no model",
            "keep model or models",
        ),
        (
            f"{SEVERAL}\n«kv_port» = 9001",
            "a host with models has no kv_port",
            "ports has those for KV: remove this line",
        ),
        (f"models = «[]»\nport = 8001\n{PORTS}", "models is empty", "name at least one"),
        (
            f'models = «"plain"»\nport = 8001\n{PORTS}',
            "models must be a list, not a string",
            'as in models = ["qwen3-coder:30b"]',
        ),
        (f'models = ["plain", «"plain"»]\nport = 8001\n{PORTS}', 'models names "plain" twice', "keep one"),
        (
            f'models = ["plain", «"qwen»"]\nport = 8001\n{PORTS}'.replace('»"', '"»'),
            'no model "qwen"',
            'this is an alias: write "qwen:30b"',
        ),
        (f'models = [«"plaim"»]\nport = 8001\n{PORTS}', 'no model "plaim"', 'did you mean "plain"?'),
        (f'{MODELS}\nport = 8001\nports = «"8100-8102"»', "these are 3 ports, and 2 models take 4", "2 for each model"),
        (
            f'{MODELS}\nport = 8001\nports = «"8131-8100"»',
            "these are no ports",
            'the first and the last, as in "8100-8131"',
        ),
        (
            f'{MODELS}\nport = 8001\nports = «"8100-65536"»',
            "these are no ports",
            'the first and the last, as in "8100-8131"',
        ),
        (f'{MODELS}\nport = 8001\nports = «"8100"»', "these are no ports", 'the first and the last, as in "8100-8131"'),
        (
            f"{MODELS}\nport = 8001\nports = «8100»",
            "ports must be a string, not an integer",
            'as in ports = "8100-8131"',
        ),
        (
            f'{MODELS}\nport = 8001\nports = «"8000-8003"»',
            "8001 of ports is already the port of [hosts.mac] on 10.0.0.2",
            "choose others",
        ),
        (f'{SEVERAL}\npreload = [«"plan"»]', '"plan" is not in models', 'did you mean "plain"?'),
        (f'{SEVERAL}\npin = ["plain", «"xyz"»]', '"xyz" is not in models', "models has qwen:30b, plain"),
        (
            f'{SEVERAL}\nmax_loaded = 1\npin = «["plain", "qwen:30b"]»',
            "pin names 2 models, and max_loaded is 1",
            "raise max_loaded",
        ),
        (f"{SEVERAL}\nmax_loaded = «0»", "max_loaded is out of range", "from 1 to 1024"),
        (f"{SEVERAL}\nmemory_bytes = «0»", "memory_bytes is out of range", f"from 1 to {1 << 50}"),
        (f"{SEVERAL}\nidle_ttl = «-1»", "idle_ttl is out of range", f"from 0 to {366 * 86400}"),
        (
            f'{SEVERAL}\nidle_ttl = «"soon"»',
            "this is no length of time",
            'seconds, or as in "90s", "30m", "2h" or "off"',
        ),
        (f'{SEVERAL}\nidle_ttl = «"400d"»', "idle_ttl is out of range", f"at most {366 * 86400} seconds"),
        (f"{SEVERAL}\nmin_stay = «true»", "min_stay must be a string, not true or false", 'as in min_stay = "30m"'),
    ],
)
def test_a_fault_in_the_keys_of_several_models_is_pointed_at(
    expect_fault: Expect, keys: str, message: str, hint: str
) -> None:
    expect_fault({MAC: keys}, message, hint)


def test_ports_are_required_and_a_host_with_one_model_has_none(expect_fault: Expect) -> None:
    expect_fault(
        {MAC: f"{MODELS}\nport = 8001", "[hosts.mac]": "«[hosts.mac]»"},
        'missing key "ports" in [hosts.mac]',
        'its models\' processes listen there: add ports = "8100-8131"',
    )
    expect_fault(
        {MAC: f'{MAC}\n«ports» = "8100-8131"'},
        'unknown key "ports" in [hosts.mac]',
        'this is a key of hosts with several models: models = ["qwen3-coder:30b"] in place of model',
    )


def test_ports_that_meet_another_hosts_are_refused(expect_fault: Expect) -> None:
    expect_fault(
        {
            'address = "10.0.0.1"': 'address = "10.0.0.2"',
            SPARK: 'model = "qwen:30b"\nport = 8110\n',
            MAC: SEVERAL.replace('"8100-8131"', '«"8100-8131"»'),
        },
        "8110 of ports is already the port of [hosts.spark] on 10.0.0.2",
        "choose others",
    )


def test_a_model_without_a_source_for_the_hosts_engine_is_refused(expect_fault: Expect) -> None:
    expect_fault(
        {SPARK: f'models = ["qwen:30b", «"plain"»]\nport = 8000\n{PORTS}\n'},
        'model "plain" has no source for the engine "transformers" of this host',
        'add transformers = "owner/model" to [models.plain.sources]',
    )


def test_a_model_that_another_server_loads_is_the_only_one_of_its_host(expect_fault: Expect) -> None:
    source = 'sources = {transformers = "Qwen/Qwen", mlx = "mlx/Qwen"}'
    expect_fault(
        {
            source: 'sources = {vllm-server = "Qwen/Qwen", mlx = "mlx/Qwen"}',
            SPARK: f'«models» = ["qwen:30b"]\nport = 8000\n{PORTS}\n',
            'name = "transformers"': 'name = "vllm-server"\nurl = "http://127.0.0.1:8100"',
        },
        "the engine's model is loaded by another server: this host has one",
        'write model = "..."',
    )


def test_its_keys_arrive(changed: Change) -> None:
    rest = 'preload = ["plain"]\npin = ["plain"]\nmax_loaded = 2\nidle_ttl = "30m"\nmin_stay = 5\nmemory_bytes = 1000'
    host = changed({MAC: f"{SEVERAL}\n{rest}"}).hosts["mac"]
    assert (host.keeps, host.models, host.model, host.kv_port) == (True, ("qwen:30b", "plain"), "", None)
    assert host.keeping == KeeperSettings(range(8100, 8132), ("plain",), ("plain",), 2, 1800.0, 5.0, 1000)
    host = changed({MAC: f'{SEVERAL}\nidle_ttl = "off"\nmin_stay = "off"'}).hosts["mac"]
    assert host.keeping == KeeperSettings(range(8100, 8132), min_stay_s=0.0)


def test_what_runs_a_model_is_each_model_of_a_host_with_several(changed: Change) -> None:
    fleet = changed({MAC: SEVERAL})
    assert list(fleet.served) == ["spark", "mac/qwen:30b", "mac/plain"]
    assert fleet.served["spark"] is fleet.hosts["spark"]
    plain = fleet.served["mac/plain"]
    assert (plain.model, plain.keeper, plain.table, plain.keeps) == ("plain", "mac", "mac", False)
    assert (plain.port, plain.kv_port, plain.kv_ports) == (0, 0, range(8100, 8132))
    assert [host.name for host in fleet.serving("qwen:30b", "decode")] == ["mac/qwen:30b"]
    assert [host.name for host in fleet.engine_hosts] == list(fleet.served)
    assert [host.name for host in fleet.select(model="plain")] == ["mac"]
    assert [host.name for host in fleet.deployed_hosts] == ["spark", "mac"]


def test_kv_comes_to_the_ports_of_decode_hosts_alone(changed: Change) -> None:
    fleet = changed({MAC: SEVERAL, SPARK: f'models = ["qwen:30b"]\nport = 8000\n{PORTS}\n'})
    assert fleet.served["mac/plain"].kv_ports == range(8100, 8132)
    assert fleet.served["spark/qwen:30b"].kv_ports == range(0)
    alone = changed({}).hosts
    assert (alone["mac"].kv_ports, alone["spark"].kv_ports) == (range(9001, 9002), range(0))


def test_a_model_has_engine_options_of_its_own_on_every_host(changed: Change) -> None:
    own = f"{PLAIN}\nengine = {{mlx = {{max_batch = 3, max_held_bytes = 5}}}}"
    fleet = changed({MAC: SEVERAL, MAC_ENGINE: f"{MAC_ENGINE}\nengine.max_batch = 9", PLAIN: own})
    assert fleet.hosts["mac"].engine == EngineOptions("mlx", max_batch=9)
    assert fleet.served["mac/qwen:30b"].engine.max_batch == 9
    assert fleet.served["mac/plain"].engine == EngineOptions("mlx", max_batch=3), "max_held_bytes is of prefill hosts"
    alone = changed({MAC: 'model = "plain"\nport = 8001\nkv_port = 9001', PLAIN: own})
    assert alone.hosts["mac"].engine.max_batch == 3


@pytest.mark.parametrize(
    ("own", "message", "hint"),
    [
        (
            "{«torch» = 1}",
            'unknown key "torch" in [models.plain.engine]',
            "there are transformers, vllm, vllm-server, mlx, simulated",
        ),
        ("{mlx = {max_batch = «0»}}", "max_batch is out of range", "from 1 to 1024"),
        (
            "{mlx = {«max_bach» = 3}}",
            'unknown key "max_bach" in [models.plain.engine.mlx]',
            'did you mean "max_batch"?',
        ),
        (
            "{vllm = {«node_rank» = 1}}",
            'unknown key "node_rank" in [models.plain.engine.vllm]',
            "this is an option of one host: write it into its engine table",
        ),
        (
            '{transformers = {device = «"gpu"»}}',
            '"gpu" is not a value for device',
            'one of "auto", "cuda", "mps", "cpu"; did you mean "cpu"?',
        ),
    ],
)
def test_a_fault_in_a_models_engine_options_is_pointed_at(
    expect_fault: Expect, own: str, message: str, hint: str
) -> None:
    expect_fault({PLAIN: f"{PLAIN}\nengine = {own}"}, message, hint)


def test_the_dtype_of_a_models_kv_is_compared_over_all_its_hosts(expect_fault: Expect) -> None:
    expect_fault(
        {MAC: SEVERAL, MAC_ENGINE: f'{MAC_ENGINE}\nengine.dtype = «"float16"»'},
        "KV in float16 does not fit [hosts.spark], which has bfloat16",
        "one dtype for all prefill and decode hosts of qwen:30b",
    )


def test_a_copy_for_another_machine_loads_as_the_same(changed: Change, tmp_path: Path) -> None:
    rest = 'preload = ["plain"]\npin = ["plain"]\nmax_loaded = 2\nidle_ttl = "30m"\nmemory_bytes = 1000'
    own = f"{PLAIN}\nengine = {{mlx = {{max_batch = 3}}}}"
    for keys in (SEVERAL, f"{SEVERAL}\n{rest}"):
        fleet = changed({MAC: keys, PLAIN: own})
        sources: dict[str, Any] = {model.name: model.sources for model in fleet.models.values()}
        (tmp_path / "copy.toml").write_text(render(fleet, ["mac"], sources))
        copy = load(tmp_path / "copy.toml")
        assert copy.hosts["mac"] == fleet.hosts["mac"]
        assert copy.served["mac/plain"] == fleet.served["mac/plain"]


def test_the_list_is_not_in_the_digest_of_the_host_and_its_ports_and_engine_are(changed: Change) -> None:
    def digest(changes: Mapping[str, str], name: str = "mac") -> str:
        fleet = changed(changes)
        return served_digest(fleet, fleet.hosts.get(name) or fleet.served[name])

    before = digest({MAC: SEVERAL})
    assert digest({MAC: SEVERAL.replace(', "plain"', "")}) == before
    assert digest({MAC: f'{SEVERAL}\npreload = ["plain"]\nidle_ttl = 5'}) == before
    assert digest({MAC: SEVERAL.replace("8131", "8132")}) != before
    assert digest({MAC: SEVERAL, MAC_ENGINE: f"{MAC_ENGINE}\nengine.max_batch = 9"}) != before
    own = {PLAIN: f"{PLAIN}\nengine = {{mlx = {{max_batch = 3}}}}"}
    assert digest({MAC: SEVERAL, **own}) == before
    assert digest({MAC: SEVERAL, **own}, "mac/plain") != digest({MAC: SEVERAL}, "mac/plain")


def test_the_digest_of_one_model_does_not_depend_on_the_ports_that_it_was_given(changed: Change) -> None:
    fleet = changed({MAC: SEVERAL})
    plain = fleet.served["mac/plain"]
    assert served_digest(fleet, replace(plain, port=8100, kv_port=8101)) == served_digest(fleet, plain)


@pytest.mark.parametrize("model", ["gpt-oss:120b", "a/b", "..", "é ☃"])
def test_a_model_names_a_file_without_leaving_the_folder(model: str, tmp_path: Path) -> None:
    (tmp_path / f"{slug(model)}.log").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == [f"{slug(model)}.log"]


def test_a_long_name_of_a_model_is_the_name_of_a_file(tmp_path: Path) -> None:
    names = ["qwen3:30b", "org/name", "ü" * 200, "ü" * 199 + "x", "mac/" + "m" * 200]
    files = [tmp_path / f"{slug(name)}-65535.requests" for name in names]
    for file in files:
        file.write_text("")
    assert len({*files}) == len(names) and files[0].name == "qwen3%3A30b-65535.requests"
