"""Hydra's errors about overrides, in one line each, with the nearest name and the remedy.

Hydra stops at the first that it can't use. Here each is composed by itself on top of the good ones."""

import argparse
import dataclasses
import difflib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException, SearchPathException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from src.config import Config
from src.errors import did_you_mean

CONF = Path(__file__).parent.parent.parent / "conf"
#: What Hydra raises while composing, where the user's words or files are at fault. A bare ValueError, too: for
#: strategy=null, or two flags that exclude each other.
COMPOSING = (HydraException, OmegaConfBaseException, YAMLError, ValueError)


def explain(error: Exception, words: list[str]) -> list[str]:
    """The lines to refuse with, when composing failed with `error`. words: the command line's."""
    from hydra._internal.utils import get_args_parser

    if isinstance(error, SearchPathException):
        return [in_one_line(error)]
    arguments = get_args_parser().parse_args(words)
    composer = Composer(make_loader(arguments), arguments.config_name or "config")
    return composer.explain(error, arguments.overrides, RunMode.MULTIRUN if arguments.multirun else RunMode.RUN)


def make_loader(arguments: argparse.Namespace) -> Any:
    """A configuration loader over the same folders as the failed one's, which is closed."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery

    main = CONF if arguments.config_path is None else CONF.parent / arguments.config_path
    search_path = create_config_search_path(str(main))
    if arguments.config_dir is not None:
        folder = f"file://{Path(arguments.config_dir).absolute()}"
        search_path.prepend(provider="command-line", path=folder, anchor=SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(search_path)


def merged_choices(words: list[str]) -> list[str]:
    """Groups that were given a list: Hydra merges the options into one node, where the user meant a sweep."""
    groups = {field.name for field in dataclasses.fields(Config) if (CONF / field.name).is_dir()}
    found = []
    for override in OverridesParser.create().parse_overrides(words):
        value = override.value()
        if override.key_or_group in groups and isinstance(value, list):
            names = ",".join(map(str, value))
            found.append(
                f"{override.input_line} would merge the options into one. For a sweep use"
                f" -m {override.key_or_group}={names}, for one run {override.key_or_group}={value[0]}."
            )
    return found


class Composer:
    """Composes parts of a command line, to find out which words of it are wrong and what would be right."""

    def __init__(self, loader: Any, config_name: str) -> None:
        self.loader, self.config_name = loader, config_name

    def compose(self, words: list[str]) -> DictConfig:
        return self.loader.load_configuration(self.config_name, words, run_mode=RunMode.RUN)

    def explain(self, error: Exception, words: list[str], mode: RunMode = RunMode.RUN) -> list[str]:
        """A line for each bad override among `words`, and for each rule that the good ones break together.

        error: what composing all of them raised; it stands for itself where every override is good on its own.
        """
        overrides, found = parse(words, mode)
        choices = [override for override in overrides if self.is_group(override.key_or_group)]
        good: list[str] = []
        bad_groups = set()
        for override in choices:
            line = self.choice_problem(override, good)
            if line:
                found.append(line)
                bad_groups.add(override.key_or_group)
            else:
                good.append(str(override.input_line))
        try:
            cfg = self.compose(good)
        except COMPOSING as base_error:
            return found or [in_one_line(base_error)]
        suspects: set[str] = set()
        for override in overrides:
            # Which keys of a group are right depends on its option.
            if override in choices or override.key_or_group.split(".")[0] in bad_groups:
                continue
            line = self.value_problem(override, cfg, good)
            if line:
                found.append(line)
                suspects |= names_in(override.key_or_group, line)
            else:
                good.append(str(override.input_line))
        if not found or bad_groups:
            return found or [in_one_line(error)]
        return found + self.rule_problems(good, suspects)

    def is_group(self, key: str) -> bool:
        return bool(self.loader.repository.group_exists(key))

    def choice_problem(self, override: Override, good: list[str]) -> str | None:
        """What is wrong with group=option."""
        group, option = override.key_or_group, override.value()
        if override.is_delete():
            return None
        if option is None:
            return f"{group}=null chooses nothing. {self.options(group, '')}"
        try:
            self.compose([*good, str(override.input_line)])
        except COMPOSING as error:
            if "Multiple values for" in str(error) and override.is_add():
                return f"{group} has a place in config.yaml already. Write {group}={option}, without the +."
            if f"'{group}/{option}'" not in str(error):
                return f"{override.input_line}: {in_one_line(error)}"
            return f"{group}={option} is no option of {group}. {self.options(group, str(option))}"
        return None

    def options(self, group: str, name: str) -> str:
        known = self.loader.get_group_options(group)
        if not known:
            return f"There is none yet; --config-dir adds a folder with your own {group}/*.yaml."
        nearest = did_you_mean(name, known)
        return nearest if nearest.startswith("Known") else f"{nearest} Known: {', '.join(known)}."

    def value_problem(self, override: Override, cfg: DictConfig, good: list[str]) -> str | None:
        """What is wrong with key=value, +key=value or ~key on top of the good overrides. cfg: the choices, composed."""
        key, adds = override.key_or_group, override.is_add() or override.is_force_add()
        exists = key in set(dotted_keys(cfg))
        if not exists and not adds:
            return unknown_key(key, cfg)
        try:
            self.compose([*good, str(override.input_line)])
        except COMPOSING as error:
            if override.is_delete() and OmegaConf.select(cfg, key) is None:
                return f"{override.input_line}: {key} is null, and Hydra can't remove that. Drop the override."
            if override.is_delete():
                return f"{key} was removed, but every run needs it. Drop the override {override.input_line}."
            if exists and override.is_add():
                return f"{key} exists already. Write {str(override.input_line).lstrip('+')}, without the +."
            reason = str(error.__cause__ or error).splitlines()[0]
            now = OmegaConf.select(cfg, key)
            as_it_is = "" if OmegaConf.is_config(now) else f" As it is: {key}={'null' if now is None else now}."
            return f"{override.input_line} does not fit: {reason}.{as_it_is}"
        return None

    def rule_problems(self, good: list[str], suspects: set[str]) -> list[str]:
        """What the good overrides have wrong together, without what may only follow from a bad one's absence."""
        from src.checks import rules  # torch

        try:
            _, found = rules.check(self.compose(good))
        except COMPOSING:
            return []  # only together do they fail; their turn comes when the others are mended
        return [line for line in found if not suspects & set(re.findall(r"\w+", line))]


def names_in(key: str, line: str) -> set[str]:
    """The last part of a bad key, and of the one that its line suggests."""
    nearest = re.search(r"Did you mean ([\w.]+)", line)
    return {name.split(".")[-1] for name in (key, nearest[1] if nearest else key)}


def parse(words: list[str], mode: RunMode) -> tuple[list[Override], list[str]]:
    """The overrides that can be read and stand for one value each, and a line for each other word.

    A sweep's axes are left out where they belong: its jobs are looked at one by one.
    """
    parser = OverridesParser.create()
    overrides, found = [], []
    for word in words:
        try:
            [override] = parser.parse_overrides([word])
        except (OverrideParseException, ValueError) as error:  # ValueError: an integer of thousands of digits
            found.append(unreadable(word, error))
            continue
        if not override.is_sweep_override():
            overrides.append(override)
        elif mode == RunMode.RUN:
            found.append(f"{word} names several values. For a sweep use -m {word}; a list is written [a,b].")
    return overrides, found


def unreadable(word: str, error: Exception) -> str:
    """A word that Hydra's grammar does not take, with the form that it does take."""
    key, equals, value = word.partition("=")
    if not equals:
        return f"{word} is no override. Write key=value."
    quoted = '{}="{}"'.format(key, value.replace('"', '\\"'))
    try:
        OverridesParser.create().parse_overrides([quoted])
    except OverrideParseException:
        return f"{word} can't be read: {in_one_line(error)}"
    return f"{word} can't be read: its value must be quoted, for Hydra and for the shell. Write {shlex.quote(quoted)}"


def unknown_key(key: str, cfg: DictConfig) -> str:
    """The line for a key that the configuration does not have: misspelt, in the wrong place, or of another option."""
    hydras = key.startswith("hydra.")
    keys = [known for known in dotted_keys(cfg) if known.startswith("hydra.") == hydras and "._" not in known]
    parent = key.rpartition(".")[0]
    while parent and parent not in keys:
        parent = parent.rpartition(".")[0]
    choice = cfg.hydra.runtime.choices.get(parent)
    where = f"{parent}={choice}" if choice else parent or "the configuration"
    prefix, last = f"{parent}." if parent else "", key.rpartition(".")[2]
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.85)
    near = near or [known for known in keys if known.rpartition(".")[2] == last]
    siblings = [k.removeprefix(prefix) for k in keys if k.startswith(prefix) and "." not in k.removeprefix(prefix)]
    if "." in parent and not siblings:  # a node that is there to be filled, such as an engine's own options
        return f"{key} is not there to be overridden; add it with +{key}=..."
    remedy = f"Did you mean {near[0]}?" if near else did_you_mean(key.removeprefix(prefix), siblings, prefix)
    return f"{key} is no key of {where}. {remedy}"


def dotted_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every key of a configuration, nodes included, from the root."""
    for key in cfg:
        yield f"{prefix}{key}"
        node = cfg._get_node(key)
        if OmegaConf.is_dict(node) and not OmegaConf.is_missing(cfg, key):
            yield from dotted_keys(node, f"{prefix}{key}.")


def in_one_line(error: Exception) -> str:
    """Any other error, without the lines that repeat it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}. Choose another folder, such as hydra.run.dir=..."
    missing = re.search(r"In '([^']+)': Could not find '([^']+)'", str(error))
    if missing:
        return f"{missing[1]}.yaml chooses {missing[2]}, which does not exist."
    skipped = ("To append", "full_key", "object_type", "reference_type", "See https", "Config search path", "provider=")
    lines = [line.strip() for text in (error, error.__cause__) if text is not None for line in str(text).splitlines()]
    return " ".join(line for line in dict.fromkeys(lines) if line and not line.startswith(skipped))
