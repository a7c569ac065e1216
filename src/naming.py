"""The names a run goes by in a tracker."""

import hashlib
from pathlib import Path
from typing import Any

MAX_NAME = 80


def run_name(info: dict[str, Any], run_dir: Path) -> str:
    """From the overrides, so that the runs of a sweep differ by what was swept; shortened, but stable and distinct."""
    words = [word.split(".")[-1] if "=" not in word else _short(word) for word in info.get("overrides", [])]
    name = " ".join(sorted(words)) or run_dir.name
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _short(override: str) -> str:
    """trainer.accumulate=4 -> accumulate=4."""
    key, _, value = override.partition("=")
    return f"{key.split('.')[-1]}={value}"


def run_tags(info: dict[str, Any]) -> list[str]:
    """The options of the groups by which people filter runs."""
    choices = info.get("choices", {})
    return [str(choices[group]) for group in ("strategy", "sharding", "precision", "model", "data") if choices.get(group)]
