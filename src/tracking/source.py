"""Which state of the source a run was started from."""

import subprocess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent


def source_state() -> dict[str, Any] | None:
    """{"commit": the first 12 digits, "dirty": whether files differ from it}; None outside a git checkout."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        words = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, dirty = words.partition("-")
    return {"commit": commit, "dirty": dirty == "dirty"}
