"""The rooms tables of docs/architecture.md against the imports of the code.

`python -m tests.test_architecture` writes the third column of the tables anew.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
EVERYWHERE = {"errors", "extras", "units", "version"}  # every room may import them, and the tables leave them out
MOST_ARROWS = {"fleet": 45, "engines": 24}  # about three for each room
MOST_FILES = 20

LISTED = re.compile(r"^\w+/?(?:, \w+)*  +\S", re.M)
"""A line of a package's docstring about some of its modules."""
ROW = re.compile(r"^(\| `disagg/([\w/]+?)(?:/|\.py)` \|.*\|) (.*?) \|$", re.M)
PICTURE = re.compile(r"^```\n( +cli .*?)^```", re.M | re.S)
PICTURE_COLUMNS = 42  # of a line; then follows what its rooms are

Rooms = dict[str, set[str]]  # room -> the rooms it imports, in the order of the floors


@cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("disagg")


def rooms_of(parent: str) -> Rooms:
    """The folders and modules directly in disagg/`parent`, with what they import of each other."""
    package = ".".join(filter(None, ("disagg", parent)))
    children = imports().find_children(package)
    rooms: Rooms = {child.removeprefix(f"{package}."): set() for child in children}
    for module in imports().find_descendants(package):
        for imported in imports().find_modules_directly_imported_by(module):
            if imported.startswith(f"{package}."):
                importer, room = (name.removeprefix(f"{package}.").split(".")[0] for name in (module, imported))
                rooms[importer] |= {room} - {importer}
    return {room: imported - EVERYWHERE for room, imported in rooms.items() if not room.startswith("__")}


def documented_rooms(parent: str) -> Rooms:
    """The rows of the table `| room | what it knows | imports |` whose rooms are in disagg/`parent`."""
    rooms: Rooms = {}
    for _, path, cell in ROW.findall(DOCUMENT.read_text()):
        folder, _, room = path.rpartition("/")
        if folder == parent:
            rooms[room] = set(re.findall(r"\w+", cell))
    return rooms


@pytest.mark.parametrize("parent", ["", "fleet", "engines", "inference", "gateway", "servers", "keeper"])
def test_the_table_names_every_room_with_what_it_imports(parent: str) -> None:
    documented = documented_rooms(parent)
    actual = rooms_of(parent)
    assert {room: documented.get(room) for room in sorted(actual)} == {room: actual[room] for room in sorted(actual)}
    assert set(documented) == set(actual)


@pytest.mark.parametrize("parent", ["", "fleet", "engines", "inference", "gateway", "servers", "keeper"])
def test_a_room_imports_only_rooms_further_down_in_the_table(parent: str) -> None:
    floors = list(documented_rooms(parent))
    upward = [
        f"{room} -> {imported}"
        for room, targets in rooms_of(parent).items()
        for imported in targets
        if floors.index(imported) <= floors.index(room)
    ]
    assert upward == []


def test_the_picture_has_every_room_and_imports_only_point_down_in_it() -> None:
    match = PICTURE.search(DOCUMENT.read_text())
    assert match is not None
    lines = [re.findall(r"\w+", line[:PICTURE_COLUMNS]) for line in match[1].splitlines()]
    floors = {room: number for number, line in enumerate(lines) for room in line}
    rooms = rooms_of("")
    assert sorted(room for line in lines for room in line) == sorted(rooms)
    level = [f"{room} -> {one}" for room, targets in rooms.items() for one in targets if floors[one] <= floors[room]]
    assert level == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not for their types alone."""
    graph = imports()
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()


@pytest.mark.parametrize("parent", MOST_ARROWS)
def test_few_arrows_join_the_rooms(parent: str) -> None:
    arrows = sum(map(len, rooms_of(parent).values()))
    assert arrows <= MOST_ARROWS[parent]


def test_a_package_that_lists_its_modules_lists_all_of_them() -> None:
    for file in (ROOT / "disagg").rglob("__init__.py"):
        about = ast.get_docstring(ast.parse(file.read_text())) or ""
        modules = [path for path in file.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        if LISTED.search(about):
            names = {path.stem for path in modules if not path.name.startswith("__")}
            missing = names - set(re.findall(r"\w+", about))
            assert not missing, f"{file}: its docstring does not name {', '.join(sorted(missing))}"


def test_no_folder_is_a_heap() -> None:
    folders = [folder for folder in (ROOT / "disagg").rglob("*") if folder.is_dir()]
    files = {
        folder.relative_to(ROOT / "disagg").as_posix(): len(
            [path for path in folder.glob("*.py") if path.stem[0] != "_"]
        )
        for folder in folders
    }
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}


def write_imports() -> None:
    def row(match: re.Match[str]) -> str:
        parent, _, room = match[2].rpartition("/")
        floors = list(documented_rooms(parent))
        imported = sorted(rooms_of(parent)[room], key=floors.index)
        return f"{match[1]} {', '.join(imported) or '-'} |"

    DOCUMENT.write_text(ROW.sub(row, DOCUMENT.read_text()))


if __name__ == "__main__":
    write_imports()


_DOES_IO = {"socket", "subprocess", "threading", "selectors", "shutil", "tempfile", "httpx", "h11", "sqlite3"}
_READS = {"stat", "read_text", "read_bytes", "write_text", "write_bytes", "monotonic", "time", "perf_counter", "sleep"}
PURE = [
    path
    for path in sorted(Path("disagg").rglob("*.py"))
    if re.search(r"\bPure\b(?! but|, but)", ast.get_docstring(ast.parse(path.read_text())) or "")
]


@pytest.mark.parametrize("path", PURE, ids=str)
def test_a_module_that_says_pure_neither_reads_nor_waits_nor_asks_the_time(path: Path) -> None:
    sized = "but the sizes of files" in (ast.get_docstring(ast.parse(path.read_text())) or "")
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in _DOES_IO]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _DOES_IO:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READS:
            found += [node.func.attr] if node.func.attr != "stat" or not sized else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.append("open")
    assert not found
