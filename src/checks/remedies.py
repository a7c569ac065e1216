"""What to choose instead: the shipped options that can do what was asked."""

from collections.abc import Callable
from pathlib import Path

import yaml

from src.checks.keys import locate
from src.strategies.base import Support

CONF = Path(__file__).parent.parent.parent / "conf"
STRATEGIES, MODELS = CONF / "strategy", CONF / "model"


def options_that(can: Callable[[Support], bool]) -> str:
    """The shipped strategies that can do something, as a remedy: "strategy=a or strategy=b"."""
    options = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(STRATEGIES.glob("*.yaml"))}
    # One without a target of its own is a variant of another that is named here.
    targets = {name: node["_target_"] for name, node in options.items() if "_target_" in node}
    return _either([f"strategy={name}" for name, target in targets.items() if can(locate(target).supports)])


def models_with(*methods: str) -> str:
    """The shipped models that carry `methods`, as a remedy: "model=a or model=b"."""
    options = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(MODELS.glob("*.yaml"))}
    # Some files speak of the data and the trainer as well, and hold the model below its key.
    classes = {name: locate(node.get("model", node)["_target_"]) for name, node in options.items()}
    carriers = [name for name, found in classes.items() if all(hasattr(found, method) for method in methods)]
    return _either([f"model={name}" for name in carriers])


def _either(choices: list[str]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
