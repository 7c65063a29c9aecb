"""The page at /: what is served, and what a browser may do with it. No browser runs here."""

from __future__ import annotations

import re

import pytest

from disagg.api.gateway import HistoryEntry, LiveHost, LiveModel, LiveRequest, LiveState, Sample, Totals
from disagg.gateway.dashboard import PAGE
from disagg.version import source_files
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient
from tests.values import present

HTML, CSS, JS = ((PAGE / name).read_text() for name in ("index.html", "app.css", "app.js"))


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/app.css", "text/css"), ("/app.js", "text/javascript"), ("/icon.svg", "image/svg+xml")],
)
async def test_each_file_is_served_to_everybody_of_this_machine_with_a_strict_policy(path: str, kind: str) -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        answer = await http.get(path)
        again = await http.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert answer.headers["content-type"].startswith(kind)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_has_no_script_style_or_address_of_its_own() -> None:
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! src=)", HTML)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", HTML)
    assert "url(" not in CSS and "@import" not in CSS


def test_text_is_never_inserted_as_html() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", JS)


def test_the_settings_of_clients_are_whole_and_state_the_context_of_the_model() -> None:
    settings = dict(re.findall(r'^  \["([^"]+)", .*?=> `(.*)`\],$', JS, re.M))
    assert settings["Continue (config.yaml)"].startswith(r"name: disagg\nversion: 1.0.0\nschema: v1\nmodels:")
    for client in ("Continue (config.yaml)", "Claude Code", "Codex (config.toml)"):
        assert "${context}" in settings[client]
    codex = settings["Codex (config.toml)"]
    assert codex.startswith("${key === NO_KEY ?") and codex.count("DISAGG_API_KEY") == 2, "it fails if that is not set"


def test_one_host_takes_no_requests_and_two_take_none() -> None:
    assert 'hosts ${down === 1 ? "takes" : "take"} no requests' in JS


def test_a_narrow_window_shows_what_to_do_about_a_host_without_its_meters() -> None:
    narrow = present(re.search(r"@media \(max-width: 1120px\) \{.*?\n\}", CSS, re.S))[0]
    assert (
        "td .meter { display: none; }" in narrow and "td.wide { min-width: 150px; overflow-wrap: anywhere; }" in narrow
    )


def test_on_a_phone_a_rows_cells_stand_in_lines_each_after_its_heading() -> None:
    phone = present(re.search(r"@media \(max-width: 640px\) \{.*?\n\}", CSS, re.S))[0]
    assert ".table tr { display: flex; flex-wrap: wrap;" in phone and "td.wide { flex-basis: 100%;" in phone
    assert "content: attr(data-head)" in phone and "row.children[place].dataset.head = text" in JS


def test_every_element_that_the_script_looks_up_exists() -> None:
    ids = set(re.findall(r'id="([\w-]+)"', HTML))
    assert set(re.findall(r'(?:\$|show)\("([\w-]+)"', JS)) <= ids


@pytest.mark.parametrize(
    ("key", "usable"), [("sk-disagg-a_B9", True), ("", False), ("sk ä", False), ("sk-→", False), ("sk\ufeff", False)]
)
def test_only_a_key_that_fits_into_a_header_is_stored(key: str, usable: bool) -> None:
    form = present(re.search(r"KEY_FORM = /(.+)/;", JS))[1]
    assert bool(re.search(form, key)) is usable
    stored = re.findall(r'if \((.+)\) sessionStorage\.setItem\("key", key\)', JS)
    assert stored == ["KEY_FORM.test(key)"] and JS.count("setItem") == 1


@pytest.mark.parametrize(
    ("variable", "kinds"),
    [
        ("totals", (Totals,)),
        ("host", (LiveHost,)),
        ("last", (HistoryEntry,)),
        ("one", (LiveRequest, HistoryEntry, Sample)),
        ("now", (LiveState,)),
        ("latest", (LiveState,)),
        ("model", (LiveModel,)),
    ],
)
def test_every_field_that_the_script_reads_is_one_of_the_contract(variable: str, kinds: tuple[type, ...]) -> None:
    known = {field for kind in kinds for field in kind.__annotations__}
    read = set(re.findall(rf"\b{variable}\.(\w+)\b(?!\()", JS)) - {"tokens", "time", "length"}
    assert read and read <= known


def test_the_page_is_deployed_with_the_package() -> None:
    assert {path for path in source_files() if path.parent == PAGE} == set(PAGE.iterdir())
