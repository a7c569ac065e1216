"""Every key of a composed configuration must be one that something reads.

Hydra accepts `+trainer.acumulate=4` and then nobody reads it. Here each key is held against the schema's
dataclasses or, below a `_target_`, against the target's signature; what fits nowhere is refused with the nearest name.
"""

import dataclasses
import difflib
import importlib
import inspect
from pathlib import Path
from traceback import extract_tb
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.checks.plain_types import fits, readable, type_hints
from src.config import TARGET_GROUPS, Config
from src.errors import Refused, did_you_mean

#: What omegaconf puts before the words of a resolver that refuses, which name the key to set.
RAISED = f"{Refused.__name__} raised while resolving interpolation: "
HYDRA_WORDS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}


def resolve(cfg: DictConfig) -> tuple[dict[str, Any], list[str], list[str]]:
    """The plain, resolved configuration without Hydra's own node; lines for keys that nothing reads; other problems.

    Those are keys that are missing, of the wrong type, or do not resolve, and targets that can't be found.
    """
    root = {key: cfg._get_node(key) for key in cfg if key != "hydra"}
    fields = {f.name for f in dataclasses.fields(Config)}
    found = Findings()
    for key in root.keys() - fields:
        found.unknown.append(f"{key} is no key of the configuration. {did_you_mean(str(key), fields)}")
    for key in sorted(fields - root.keys()):
        found.broken.append(f"{key} was removed, but every run needs it. Drop the override ~{key}.")
    resolved = _resolve(cfg, [key for key in root if key in fields], found)
    for key, value in resolved.items():
        typed = OmegaConf.get_type(root[key])
        if dataclasses.is_dataclass(typed):
            resolved[key] = found.against_dataclass(str(key), value, typed)
        elif key in TARGET_GROUPS and (not isinstance(value, dict) or "_target_" not in value):
            found.broken.append(
                f"{key} has no _target_, so nothing can be built of it. Choose one with {key}=<option>."
            )
        elif isinstance(value, dict) and "_target_" in value:
            found.against_target(str(key), value)
        elif isinstance(value, dict):  # a group whose option builds nothing, such as compression=none
            found.unknown += [f"{key}.{name} is nothing that this option of {key} takes. Drop it." for name in value]
    return resolved, found.unknown, list(dict.fromkeys(found.broken))


def _resolve(cfg: DictConfig, keys: list[Any], found: "Findings") -> dict[Any, Any]:
    """The resolved value of each top-level key that resolves."""
    resolved = {}
    for key in keys:
        node = cfg._get_node(key)
        try:
            is_node = OmegaConf.is_config(node)
            resolved[key] = OmegaConf.to_container(node, resolve=True, enum_to_str=True) if is_node else cfg[key]
        except OmegaConfBaseException as error:
            found.broken.append(unresolved(error, str(key)))
    return resolved


def unresolved(error: OmegaConfBaseException, key: str) -> str:
    """The line for a ${...} to nowhere. key: where it was met, in case the error does not know better."""
    where = getattr(error, "full_key", None) or key
    reason = str(error.msg if hasattr(error, "msg") and error.msg else error).splitlines()[0]
    if reason.startswith(RAISED):
        return reason.removeprefix(RAISED)
    return f"{where} can't be resolved: {reason}. Correct the ${{...}} that it holds."


@dataclasses.dataclass
class Findings:
    """unknown: keys that nothing reads. broken: what keeps the rest from being understood."""

    unknown: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)

    def against_dataclass(self, path: str, value: dict[str, Any], schema: Any) -> dict[str, Any]:
        """`value` without the keys that `schema` does not have."""
        fields = [f.name for f in dataclasses.fields(schema)]
        for key in value:
            if key not in fields:
                self.unknown.append(f"{path}.{key} is no key of {path}. {did_you_mean(key, fields, f'{path}.')}")
        for key in fields:
            if key not in value:
                self.broken.append(
                    f"{path}.{key} was removed, but every run needs it. Drop the override ~{path}.{key}."
                )
            elif value[key] == "???":
                self.broken.append(f"{path}.{key} has no value; give one with {path}.{key}=...")
        return {key: item for key, item in value.items() if key in fields}

    def against_target(self, path: str, node: dict[str, Any]) -> None:
        """The keys of a node against its target's signature, and of the nodes with a target below it."""
        if node.get("_target_", "???") != "???":
            try:
                self.against_signature(path, node, locate(str(node["_target_"])))
            except ImportError as error:
                self.broken.append(f"{path}._target_={node['_target_']} can't be found: {error}")
                return
        for key, value in node.items():
            if value == "???":
                self.broken.append(f"{path}.{key} has no value; give one with {path}.{key}=...")
            if isinstance(value, dict):
                self.against_target(f"{path}.{key}", value)

    def against_signature(self, path: str, node: dict[str, Any], target: Any) -> None:
        if not callable(target):
            self.broken.append(
                f"{path}._target_={node['_target_']} is a {type(target).__name__}, which can't be built."
            )
            return
        try:
            parameters = inspect.signature(target).parameters.values()
        except (TypeError, ValueError):
            return  # a builtin without a signature: instantiating it is the check
        names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        given = [key for key in node if key not in HYDRA_WORDS]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            for key in given:
                if key not in names:
                    remedy = did_you_mean(key, names, f"{path}.")
                    self.unknown.append(f"{path}.{key} is nothing that {node['_target_']} takes. {remedy}")
        if not node.get("_partial_") and "_args_" not in node:
            for p in parameters:
                if p.name in names and p.name not in given and p.default is p.empty:
                    remedy = f"{node['_target_']} needs it. Give it with {path}.{p.name}=..."
                    self.broken.append(f"{path}.{p.name} is missing; {remedy}")
        hints = type_hints(target)
        for key in given:
            if key in names and key in hints and node[key] != "???" and not fits(node[key], hints[key]):
                self.broken.append(f"{path}.{key}={node[key]!r} is not {readable(hints[key])}.")


def takes(target: str, name: str) -> bool:
    """Whether what a dotted path names has an argument of that name. What has no signature may."""
    try:
        parameters = inspect.signature(locate(target)).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def locate(dotted_path: str) -> Any:
    """The object of a dotted path. Raises ImportError with the part that is missing and the nearest name."""
    parts = dotted_path.split(".")
    if not all(parts):
        raise ImportError(f"{dotted_path!r} is no dotted path.")
    found: Any = None
    for index, part in enumerate(parts):
        path = ".".join(parts[: index + 1])
        if index and hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and not path.startswith(error.name):
                raise ImportError(f"{path} needs {error.name}, which is not installed.") from error
            if found is None:
                raise ImportError(f"there is no module {part} beside train.py or on the PYTHONPATH.") from error
            names = [name for name in dir(found) if not name.startswith("_")]
            near = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
            hint = f" Did you mean {'.'.join(parts[:index])}.{near[0]}?" if near else ""
            raise ImportError(f"{'.'.join(parts[:index])} has no {part}.{hint}") from error
        except Exception as error:  # whatever a module of the user's does when it is imported
            where = extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            raise ImportError(f"importing {path} raised {type(error).__name__}: {error} ({place}).") from error
    return found
