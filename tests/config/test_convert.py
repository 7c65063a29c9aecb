"""From a JSON list of servers to a hosts.toml that loads and says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Fleet, load
from disagg.config.convert import from_json
from disagg.config.starter import write
from disagg.errors import ConfigError


def server(host: str = "10.0.0.1", port: int = 8000, model: str = "gpt-oss:120b", **more: Any) -> dict[str, Any]:
    return {"host": host, "port": port, "model": model, **more}


def converted(folder: Path, **sections: Any) -> Fleet:
    path = folder / "hosts.toml"
    write(from_json(json.dumps(sections), "s.json").text, path, force=True)
    return load(path)


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        from_json(text, "s.json")
    return caught.value


def test_servers_become_hosts_with_role_engine_and_service(tmp_path: Path) -> None:
    fleet = converted(
        tmp_path,
        prefill_servers=[server(name="spark")],
        decode_servers=[server("10.0.0.2", 8001, name="mac"), server("localhost", 8001, "org/other", name="here")],
    )
    summary = {
        h.name: (h.address, h.port, h.kv_port, h.roles, h.model, h.engine.name, h.connector, h.service)
        for h in fleet.hosts.values()
    }
    assert summary == {
        "spark": ("10.0.0.1", 8000, None, ("prefill",), "gpt-oss:120b", "transformers", "ssh", "systemd"),
        "mac": ("10.0.0.2", 8001, 9001, ("decode",), "gpt-oss:120b", "mlx", "ssh", "launchd"),
        "here": ("localhost", 8001, 9001, ("decode",), "org/other", "mlx", "local", "process"),
    }


def test_models_that_are_known_get_the_sources_of_the_shipped_fleet(tmp_path: Path) -> None:
    shipped = load(Path(__file__).parents[2] / "hosts.toml")
    fleet = converted(
        tmp_path,
        prefill_servers=[server(), server(port=8001, model="qwen3-coder:30b")],
        decode_servers=[server(port=8002), server(port=8003, model="qwen3-coder:30b")],
    )
    assert fleet.models.keys() == shipped.models.keys()
    for name, model in fleet.models.items():
        assert (model.sources, model.context) == (shipped.models[name].sources, shipped.models[name].context)


def test_other_models_get_a_source_to_be_checked_for_each_engine_in_use(tmp_path: Path) -> None:
    sections = {
        "prefill_servers": [server(model="org/m")],
        "decode_servers": [server(port=1, model="org/m"), server(port=2, model="my model?")],
    }
    fleet = converted(tmp_path, **sections)
    assert fleet.models["org/m"].sources == {"transformers": "org/m", "mlx": "org/m"}
    assert fleet.models["my model?"].sources == {"mlx": str(tmp_path / "models/my-model")}
    lines = from_json(json.dumps(sections), "s.json").text.splitlines()
    assert "context = 8192 # CHECK: prompt and answer together, in tokens" in lines
    assert 'mlx = "org/m" # CHECK: hub id or path' in lines
    assert "kv_port = 9001 # CHECK: prefill hosts deliver KV here" in lines


HOSTILE = ['a"b', "a\\b", "it's", "]\\nx=1", "# x", "a.b", "[fleet]", '"""', "日本", "${HOME}", "\\u0041", "../../x"]


@pytest.mark.parametrize("model", HOSTILE)
def test_hostile_model_names_come_through_unchanged(tmp_path: Path, model: str) -> None:
    fleet = converted(tmp_path, decode_servers=[server(model=model)])
    assert list(fleet.models) == [model]
    assert fleet.hosts["decode-1"].model == model


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "a", "a"], ["a", "a-2", "a-3"]),
        ([None, "", None], ["decode-1", "decode-2", "decode-3"]),
        ([None, "decode-1"], ["decode-2", "decode-1"]),
        (["a", "a-2", "a"], ["a", "a-2", "a-3"]),
        (["my mac!", '"]\n[x', "--rf", "💥", "x" * 99], ["my-mac", "x", "rf", "decode-1", "x" * 56]),
        (["mac.lan"], ["mac.lan"]),
    ],
)
def test_names_are_made_safe_and_unique(tmp_path: Path, names: list[str | None], expected: list[str]) -> None:
    servers = [server(port=8000 + index, name=name) for index, name in enumerate(names)]
    assert list(converted(tmp_path, decode_servers=servers).hosts) == expected


def test_a_missing_name_is_made_from_the_role(tmp_path: Path) -> None:
    fleet = converted(tmp_path, prefill_servers=[server(), server(port=8001)], decode_servers=[server(port=8002)])
    assert list(fleet.hosts) == ["prefill-1", "prefill-2", "decode-1"]


def test_kv_ports_are_free_on_their_machine(tmp_path: Path) -> None:
    fleet = converted(
        tmp_path,
        prefill_servers=[server("Box", 9001)],
        decode_servers=[server("box", 9003, name="a"), server("box", 9004, name="b"), server("other", 1, name="c")],
    )
    assert [fleet.hosts[name].kv_port for name in "abc"] == [9002, 9005, 9001]


def test_unknown_keys_are_reported_and_left_out(tmp_path: Path) -> None:
    body = {"decode_servers": [server(prot=1, gpu="x")], "decode_server": [], "\x1b[2J": 0}
    assert from_json(json.dumps(body), "s.json").ignored == (
        'decode_server: unknown, ignored (did you mean "decode_servers"?)',
        "\ufffd[2J: unknown, ignored",
        'decode_servers[0].prot: unknown, ignored (did you mean "port"?)',
        "decode_servers[0].gpu: unknown, ignored",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b" 2}', "s.json:2:6: not valid JSON: Expecting ':' delimiter\n  2 |  \"b\" 2}\n    |      ^"),
        ("", "s.json:1:1: not valid JSON: Expecting value\n  1 | \n    | ^"),
        ("{}x", "s.json:1:3: not valid JSON: Extra data\n  1 | {}x\n    |   ^"),
    ],
)
def test_malformed_json_is_pointed_at(text: str, message: str) -> None:
    assert refusal(text).message == message


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "1" * 5000 + "]"])
def test_json_that_overstrains_the_parser_is_refused(text: str) -> None:
    assert refusal(text).message.startswith("s.json: not usable JSON")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], 's.json: neither "prefill_servers" nor "decode_servers" is in it'),
        ({"servers": []}, 's.json: neither "prefill_servers" nor "decode_servers" is in it'),
        ({"decode_servers": []}, "s.json: lists no servers"),
        ({"decode_servers": {}}, "s.json: decode_servers is not a list"),
        ({"prefill_servers": [3]}, "s.json: prefill_servers[0] is not an object"),
        ({"prefill_servers": [server(), {"port": 1}]}, 's.json: prefill_servers[1]: missing "host"'),
        ({"prefill_servers": [{"host": "a", "model": "m"}]}, 's.json: prefill_servers[0]: missing "port"'),
        ({"prefill_servers": [{"host": "a", "port": 1}]}, 's.json: prefill_servers[0]: missing "model"'),
        ({"decode_servers": [server(port="8000")]}, "s.json: decode_servers[0].port: must be an integer"),  # type: ignore[arg-type]  # that is the fault
        ({"decode_servers": [server(port=True)]}, "s.json: decode_servers[0].port: must be an integer"),
        ({"decode_servers": [server(port=0)]}, "s.json: decode_servers[0].port: out of range"),
        ({"decode_servers": [server(port=65536)]}, "s.json: decode_servers[0].port: out of range"),
        ({"decode_servers": [server(host=3)]}, "s.json: decode_servers[0].host: must be a string"),  # type: ignore[arg-type]  # that is the fault
        ({"decode_servers": [server(host="a b")]}, 's.json: decode_servers[0].host: "a b" is not an address'),
        ({"decode_servers": [server(model="")]}, "s.json: decode_servers[0].model: not usable as a name"),
        ({"decode_servers": [server(model="a\nb")]}, "s.json: decode_servers[0].model: not usable as a name"),
        ({"decode_servers": [server(model="\ud800")]}, "s.json: decode_servers[0].model: not usable as a name"),
        ({"decode_servers": [server(name=3)]}, "s.json: decode_servers[0].name: must be a string"),
        (
            {"prefill_servers": [server("Box")], "decode_servers": [server("box")]},
            "s.json: two servers have port 8000 on box",
        ),
    ],
)
def test_a_value_that_cannot_be_used_is_named(body: Any, message: str) -> None:
    assert refusal(json.dumps(body)).message == message
