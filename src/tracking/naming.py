"""The names a run goes by in a tracker."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

MAX_NAME = 80  # characters; W&B takes 128, its tables show fewer
MAX_VALUE = 24
#: Where a run is followed, and what it is called, do not say what was run.
SAYS_NOTHING = ("tracking", "name")
TAG_GROUPS = ("strategy", "sharding", "precision", "model", "data")


def run_name(info: dict[str, Any], config: dict[str, Any], run_dir: Path) -> str:
    """From the overrides, so that the runs of a sweep differ by what was swept: "strategy=fsdp accumulate=4".

    The same for the same overrides in any order; where shortening hides what differs, a digest shows it.
    info: "overrides" as typed. config: resolved; a last name that it holds twice stays with its group.
    Without overrides the name is the run folder's.
    """
    overrides = [word for word in info.get("overrides", []) if _key(word).split(".")[0] not in SAYS_NOTHING]
    if not overrides:
        return f"{info['sweep']}/{run_dir.name}" if info.get("sweep") else run_dir.name
    occurrences = Counter(_last_names(config))
    # Options of groups first: they say more, and a long name is cut at its end.
    overrides = sorted(overrides, key=lambda override: ("." in _key(override), override))
    name = " ".join(_shortened(override, occurrences) for override in overrides)
    hides = any(len(override.partition("=")[2]) > MAX_VALUE for override in overrides)
    if len(name) <= MAX_NAME and not hides:
        return name
    digest = hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:6]
    return f"{name[: MAX_NAME - len(digest) - 1].rstrip()}-{digest}"


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _shortened(override: str, occurrences: Counter[str]) -> str:
    """trainer.accumulate=4 -> accumulate=4, where no other group has an `accumulate`. ~trainer.x -> ~x."""
    _, equals, value = override.partition("=")
    key = _key(override)
    last = key.split(".")[-1]
    mark = "~" if override.startswith("~") else ""
    return f"{mark}{last if occurrences[last] <= 1 else key}{equals}{value[:MAX_VALUE]}"


def _last_names(config: dict[str, Any]) -> list[str]:
    """The last name of every value below a group: ["max_steps", "accumulate", …]."""
    found: list[str] = []
    for key, value in config.items():
        found += _last_names(value) if isinstance(value, dict) else [str(key)]
    return found


def run_tags(info: dict[str, Any]) -> list[str]:
    """The options of the groups by which people filter runs."""
    choices = info.get("choices", {})
    return [str(choices[group]) for group in TAG_GROUPS if choices.get(group)]
