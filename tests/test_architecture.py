"""ARCHITECTURE.md's claims that a program can check."""

import ast
import re
from pathlib import Path

import pytest

from tests.command import REPOSITORY

SOURCE = REPOSITORY / "src"
PAGE = (REPOSITORY / "ARCHITECTURE.md").read_text()
#: The rooms of src/ in the order of the page's table; those of one row stand on one floor.
ROWS = [re.findall(r"`src/(\w+)", line.split("|")[1]) for line in PAGE.splitlines() if line.startswith("| `src/")]
FLOORS = {room: floor for floor, rooms in enumerate(ROWS) for room in rooms}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file imports from, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("src."):
            names.append(node.module)
        elif isinstance(node, ast.ImportFrom) and node.module == "src":
            names += [f"src.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names}


MODULES = [path for path in sorted(SOURCE.rglob("*.py")) if path.name != "__init__.py"]


def test_the_page_knows_every_room():
    assert {room(path) for path in MODULES} == set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    up = [other for other in imported_rooms(path) if FLOORS[other] < FLOORS[room(path)]]
    assert not up, f"{path.name} imports from {up}, which stand above it on the page"


def test_no_file_has_outgrown_its_one_idea():
    assert {path.name: n for path in MODULES if (n := len(path.read_text().splitlines())) > 250} == {}
