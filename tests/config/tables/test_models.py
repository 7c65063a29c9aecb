"""Every rule of [models] tables, broken once, and how names and sources are resolved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import disagg
from disagg.config import Fleet, load
from disagg.errors import ConfigError, UnknownModel

Expect = Callable[[dict[str, str], str, str], ConfigError]

QWEN = '[models."qwen:30b"]'
ALIASES = 'aliases = ["qwen"]'
SOURCES = 'sources = {transformers = "Qwen/Qwen", mlx = "mlx/Qwen"}'
PLAIN = "[models.plain]\ncontext = 64"
PLAIN_SOURCE = 'mlx = "./plain"'
LABEL_RULE = "printable characters, no blank at either end, at most 200"


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({ALIASES: '«alias» = ["q"]'}, 'unknown key "alias" in [models."qwen:30b"]', 'did you mean "aliases"?'),
        (
            {SOURCES: 'sources = {transformers = "a/b", «torch» = "a/b"}'},
            'unknown key "torch" in [models."qwen:30b".sources]',
            "there are transformers, vllm, vllm-server, mlx, simulated",
        ),
        ({PLAIN: "«[models.plain]»"}, 'missing key "context" in [models.plain]', "add context = 32768"),
        (
            {SOURCES: "", QWEN: f"«{QWEN}»"},
            'missing key "sources" in [models."qwen:30b"]',
            'add sources = {transformers = "owner/model", mlx = "owner/model"}',
        ),
        (
            {PLAIN_SOURCE: "", "[models.plain.sources]": "«[models.plain.sources]»"},
            "[models.plain.sources] is empty",
            'as in transformers = "owner/model" or mlx = "./models/mine"',
        ),
        ({PLAIN: "[models.plain]\ncontext = «0»"}, "context is out of range", "from 1 to 16777216"),
        ({PLAIN: "[models.plain]\ncontext = «-5»"}, "context is out of range", "from 1 to 16777216"),
        ({PLAIN: "[models.plain]\ncontext = «16777217»"}, "context is out of range", "from 1 to 16777216"),
        (
            {PLAIN: '[models.plain]\ncontext = «"32k"»'},
            "context must be an integer, not a string",
            "as in context = 32768",
        ),
        ({ALIASES: 'aliases = «"qwen"»'}, "aliases must be a list, not a string", 'as in aliases = ["qwen"]'),
        ({ALIASES: 'aliases = ["a",\n  «3.5»]'}, "aliases holds strings, not a fraction", 'as in aliases = ["qwen"]'),
        ({ALIASES: 'aliases = ["a", «"a"»]'}, 'aliases names "a" twice', "keep one"),
        ({ALIASES: "aliases = ['a', «''»]"}, "this alias is not usable", LABEL_RULE),
        ({ALIASES: 'aliases = [«"a\\u001b[1m"»]'}, "this alias is not usable", LABEL_RULE),
        ({"[models.plain]": '[models.«" plain"»]'}, "this model name is not usable", LABEL_RULE),
    ],
)
def test_a_fault_in_a_model_is_pointed_at(
    expect_fault: Expect, changes: dict[str, str], message: str, hint: str
) -> None:
    expect_fault(changes, message, hint)


@pytest.mark.parametrize(
    ("alias", "owner"),
    [
        ("plain", "the name of [models.plain]"),
        ("qwen:30b", 'the name of [models."qwen:30b"]'),
    ],
)
def test_an_alias_that_is_a_models_name_is_pointed_at(expect_fault: Expect, alias: str, owner: str) -> None:
    expect_fault(
        {ALIASES: f'aliases = ["q", «"{alias}"»]'}, f'alias "{alias}" is already {owner}', "choose another alias"
    )


def test_an_alias_of_two_models_is_pointed_at_where_it_is_given_again(expect_fault: Expect) -> None:
    expect_fault(
        {PLAIN: PLAIN + "\naliases = ['p', «'qwen'»]"},
        'alias "qwen" is already an alias of [models."qwen:30b"]',
        "choose another alias",
    )


@pytest.mark.parametrize("source", ["", "a b", "a/b/c", "qwen:30b", "../x\\u0000", "; rm"])
def test_a_source_that_is_neither_hub_id_nor_path_is_pointed_at(expect_fault: Expect, source: str) -> None:
    expect_fault(
        {PLAIN_SOURCE: f'mlx = «"{source}"»'},
        "this is neither a hub id nor a path",
        'a hub id reads "owner/model"; a path begins with ".", "/", "~" or "package:"',
    )


def test_the_home_of_an_unknown_user_is_pointed_at(expect_fault: Expect) -> None:
    expect_fault(
        {PLAIN_SOURCE: 'mlx = «"~no-such-user-here/m"»'}, "this user has no home folder here", "write the path out"
    )


@pytest.mark.parametrize(
    ("source", "resolved"),
    [
        ("./m", "{folder}/m"),
        ("../m", "{parent}/m"),
        ("/models/./m", "/models/m"),
        ("~/m", "{home}/m"),
        ("package:demo/models/x", "{package}/demo/models/x"),
        ("owner/model-1.5_b", "owner/model-1.5_b"),
        ("gpt2", "gpt2"),
    ],
)
def test_sources_that_are_paths_become_absolute(
    tmp_path: Path, fleet_text: str, monkeypatch: pytest.MonkeyPatch, source: str, resolved: str
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/homes/me")
    (folder / "hosts.toml").write_text(fleet_text.replace("./plain", source), encoding="utf-8")
    model = load(Path("here/hosts.toml")).model("plain")
    package = Path(disagg.__file__).parent
    assert model.sources == {"mlx": resolved.format(folder=folder, parent=tmp_path, home="/homes/me", package=package)}


@pytest.fixture
def fleet(tmp_path: Path, fleet_text: str) -> Fleet:
    path = tmp_path / "hosts.toml"
    path.write_text(fleet_text, encoding="utf-8")
    return load(path)


def test_names_and_aliases_lead_to_the_model(fleet: Fleet) -> None:
    assert fleet.model("qwen").name == fleet.model("qwen:30b").name == "qwen:30b"
    assert (fleet.model("plain").context, fleet.model("plain").aliases) == (64, ())


def test_an_unknown_model_is_answered_with_those_there_are_and_the_nearest(fleet: Fleet) -> None:
    with pytest.raises(UnknownModel) as caught:
        fleet.model("Qwen:3b")
    assert caught.value.message == 'no model "Qwen:3b" in this fleet: it has qwen:30b (qwen), plain'
    assert caught.value.hint == 'did you mean "qwen:30b"?'


def test_the_hint_for_an_unknown_model_that_is_near_none_lists_all(fleet: Fleet) -> None:
    with pytest.raises(UnknownModel) as caught:
        fleet.model("\x1b[2J" + "z" * 5000)
    assert caught.value.hint == 'one of "qwen:30b", "qwen", "plain"'
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 200


def test_hosts_that_serve_a_model_are_found_by_role(fleet: Fleet) -> None:
    assert [host.name for host in fleet.serving("qwen:30b", "decode")] == ["mac"]
    assert fleet.serving("plain", "decode") == []
