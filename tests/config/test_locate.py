"""The walker knows where everything stands: what it encloses, read alone, is what tomli reads there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tomli

from disagg.config.locate import KeyPath, locate

EVERYTHING = (
    r'''# a comment with "quotes' [and] = signs
top = 1 # [not.a.table]
"quoted key" = 'literal # no comment'
'lit"eral' = "basic \" ] } # \\"
dotted . "in.ner" . deep = true
date = 1979-05-27 07:32:00
time = 07:32:00.5
float=-1_0.5e+3
infinite = -inf
multi = """
[not.a.table]
key = "no" \"""
""""
multi_literal = '''
    + "'''"
    + r"""
[nor.this]
a "quoted" 'word' """
    + "''''"
    + r'''
empty = ""
empty_multi = """"""
list = [ 1, "two, ]", [3, [ ]], {x = 4, "y.z" = [5]}, # comment ]
  # another , comment
  6,
]
inline = { a = 1, b.c = "}", "d e" = { f = [ "g" ] } }

	[ spaced . out ]	# tabs too
x = 1
[table."sub.table".'lit']
"\u0041\"" = 2
[table]
after = 3
[[many]]
n = 1
[many.sub]
n = 2
[[many]]
n = 3
[many.sub]
n = 4
[[many.deeper]]
n = 5
last = 1'''
)


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield (*path, key), below
        yield from leaves(below, (*path, key))


@pytest.mark.parametrize(("path", "value"), list(leaves(tomli.loads(EVERYTHING))))
def test_what_stands_at_a_place_is_what_tomli_reads_there(path: KeyPath, value: Any) -> None:
    place = locate(EVERYTHING)[path]
    key, shown = EVERYTHING[slice(*place.key)], EVERYTHING[slice(*place.value)]
    if isinstance(path[-1], str):
        assert list(tomli.loads(f"{key} = 0")) == [path[-1]]
    is_table = isinstance(value, dict) or shown.startswith("[[")
    if not is_table or shown.startswith("{"):
        assert tomli.loads(f"v = {shown}") == {"v": value}


def test_nothing_is_located_that_tomli_does_not_read() -> None:
    assert set(locate(EVERYTHING)) == {path for path, _ in leaves(tomli.loads(EVERYTHING))}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("[a.b]\nc = 1", ("a", "b"), "[a.b]"),
        ("[a.b]\nc = 1", ("a",), "a"),
        ("[a.b]\nc = 1\n[a]\nd = 2", ("a",), "[a]"),
        ("a.b.c = 1\na.b.d = 2", ("a", "b"), "b"),
        ("  [[ a ]] # x", ("a", 0), "[[ a ]]"),
    ],
)
def test_a_tables_value_is_its_header_or_the_first_key_that_implies_it(text: str, path: KeyPath, value: str) -> None:
    assert text[slice(*locate(text)[path].value)] == value


@pytest.mark.parametrize("text", ["a = 1\nb = " + "[" * 3000, "a = 1\n= 2", 'a = 1\nb = "', "a = 1\n[", "a = 1\nb = {"])
def test_a_walk_that_ends_early_keeps_what_it_found(text: str) -> None:
    assert ("a",) in locate(text)
