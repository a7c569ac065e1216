"""Hydra's errors about overrides, in one line each and with the nearest name."""

import re
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from src.keys import did_you_mean

CONF = Path(__file__).parent.parent / "conf"


def explain(error: Exception, overrides: list[str]) -> list[str]:
    """The lines to refuse with. overrides: the command line's words."""
    text = str(error).strip()
    option = re.search(r"Could not find '([\w/@.]+)/([^/']+)'", text)
    if option:
        group, name = option.groups()
        known = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        return [f"{group}={name} is no option of {group}. {did_you_mean(name, known)} Known: {', '.join(known)}."]
    key = re.search(r"Could not (?:override|delete from config\.) ?'?([\w.@/]+)'?", text)
    cause = error.__cause__
    if key and (cause is None or "not in" in str(cause) or "Key" in str(cause)):
        return [f"{key[1]} is no key of the configuration. {did_you_mean(key[1], known_keys(overrides))}"]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if cause is not None and str(cause).strip() not in text:
        lines.append(str(cause).strip().splitlines()[0])
    return [" ".join(line for line in lines if not line.startswith(("To append", "full_key", "object_type", "reference_type")))]


def known_keys(overrides: list[str]) -> list[str]:
    """Every dotted key of the configuration that the good part of the command line composes to."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    chosen = [word for word in overrides if word.split("=")[0] in groups and "," not in word]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            cfg = compose("config", overrides=chosen)
        except HydraException:
            cfg = compose("config")
    return list(_dotted(cfg))


def _dotted(cfg: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in cfg:
        keys.append(f"{prefix}{key}")
        node = cfg._get_node(key)
        if OmegaConf.is_dict(node) and not OmegaConf.is_missing(cfg, key):
            keys += _dotted(node, f"{prefix}{key}.")
    return keys
