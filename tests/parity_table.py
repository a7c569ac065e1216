"""The README's tables of what equals what, which the parity tests hold or write."""

import re

from tests.command import REPOSITORY

README = REPOSITORY / "README.md"


def check_table(name: str, table: str, write: bool) -> None:
    """Hold the README's table `name` against the one just measured, or write it there."""
    text = README.read_text()
    pattern = re.compile(rf"(<!-- {name} table -->\n).*?(<!-- end of {name} table -->)", re.DOTALL)
    assert pattern.search(text), f"README.md has lost the markers of its {name} table"
    updated = pattern.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    if write:
        README.write_text(updated)
    assert updated == text or write, f"README.md's {name} table is out of date: run make parity-table"
