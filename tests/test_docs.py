"""The documentation is true as far as a program can tell: links lead somewhere, commands exist, messages are ours."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer.main

from disagg.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def our_strings() -> str:
    """Every string of the package; \0 where an f-string inserts a value."""
    texts = []
    for file in sorted((ROOT / "disagg").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_exists(page: Path) -> None:
    root = typer.main.get_command(app)
    for block in re.findall(r"```(?:sh)?\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in re.findall(r"^(?:.*\| )?disagg ([a-z].*)$", block, re.MULTILINE):
            words = line.partition("#")[0].split()
            command = root
            while words and hasattr(command, "commands") and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            assert command is not root, f"{page.name}: disagg {line}"
            known = {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            } | {"--help", "--"}
            used = {word.strip("[].,") for word in words if re.match(r"\[?--?[a-z]", word)}
            assert used <= known, f"{page.name}: disagg {line}: {used - known}"


def test_every_quoted_message_is_one_that_disagg_prints() -> None:
    page, ours = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), our_strings()
    first_column = re.findall(r"^\| (`[^|]+`)", page, re.MULTILINE)
    pieces = [
        piece.strip()
        for cell in first_column
        for message in re.findall(r"`([^`]+)`", cell)
        for piece in message.split("...")
        if len(piece.strip()) > 3
    ]
    assert len(pieces) > 15
    assert [piece for piece in pieces if piece not in ours] == []


def test_the_demo_states_size_and_time_before_its_packages_are_installed() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("$(VENV)/.ready: pyproject.toml")[2].partition("touch $@")[0]
    assert 0 < recipe.index("environment.py") < recipe.index("minutes") < recipe.index("GB to download")
