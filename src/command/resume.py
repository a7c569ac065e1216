"""checkpoint.resume: which words an earlier run was given, which folder to go on in, and from which checkpoint.

Hydra composes afresh from the earlier run's overrides followed by today's, so that today's `strategy=tp` brings all of
that option. The earlier run's own files in .hydra/ stay: each resume adds .hydra/resume-<n>/ and resume-<n>.yaml.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from src.checkpoint.manifest import read_manifest
from src.checkpoint.whole import BEST, FOLDER, LAST, check, newest_whole, pointed, step_of
from src.command.vouching import refuse_what_chooses_code

KEY, SOURCE_KEY = "checkpoint.resume", "task.checkpoint"
_RESUME = re.compile(r"resume-(\d+)")
_WANDB_RUN = re.compile(r"(?:offline-)?run-\d+_\d+-(\w+)")
AUTO = "auto"


def with_earlier_words(words: list[str]) -> list[str]:
    """The command line's words with those of the run that checkpoint.resume names before them.

    Says nothing of what is wrong: the checks do, once everything is composed. But a word that could choose code must
    not come so far: then it raises Refused.
    """
    if "-m" in words or "--multirun" in words:
        return words
    target, source = _value_of(KEY, words), _value_of(SOURCE_KEY, words)
    if source is not None:
        run_dir, _ = split_target(Path(source))
        # What was trained, not how long, nor where its own training began.
        return [*_still_meant(earlier_overrides(run_dir) or [], [*words, "task="], run_dir), *words]
    if target == AUTO:
        folder = _value_of("hydra.run.dir", words)
        return words if folder is None else words + _own_subfolder(Path(folder), words)
    if target in (None, "", "null"):
        return words
    assert target is not None
    run_dir, checkpoint = split_target(Path(target))
    earlier = earlier_overrides(run_dir)
    if earlier is None:
        return words
    words = [*_still_meant(earlier, words, run_dir), *words]
    if checkpoint is None:
        elsewhere = _value_of("hydra.run.dir", words)
        if elsewhere is None:
            words.append(f"hydra.run.dir={_quoted(str(run_dir))}")
        words += _own_subfolder(run_dir if elsewhere is None else Path(elsewhere), words)
    return words


def split_target(target: Path) -> tuple[Path, Path | None]:
    """(the run's folder, the checkpoint where one is named, be it by the pointer `last` or `best`)."""
    if target.name in (LAST, BEST) and target.parent.name == FOLDER:
        target = pointed(target.parent, target.name) or target
    if step_of(target.name) is not None and target.parent.name == FOLDER:
        return target.parent.parent, target
    return target, None


def earlier_overrides(run_dir: Path) -> list[str] | None:
    """What the run, or its last resume, was given; None where there is no run."""
    folders = [run_dir / ".hydra", *(run_dir / ".hydra" / f"resume-{n}" for n in range(1, resumes_of(run_dir) + 1))]
    for folder in reversed(folders):
        path = folder / "overrides.yaml"
        if path.is_file():
            words = yaml.safe_load(path.read_text(encoding="utf-8")) or []
            return [str(word) for word in words if _key(str(word)) != KEY]
    return None


def resumes_of(run_dir: Path) -> int:
    """How often the run has been gone on with."""
    names = [path.name for path in (run_dir / ".hydra").glob("resume-*")]
    return max((int(match[1]) for name in names if (match := _RESUME.fullmatch(name))), default=0)


def _own_subfolder(run_dir: Path, words: list[str]) -> list[str]:
    """Where Hydra puts its files of this resume, beside those of the run; nothing where there is no run yet."""
    if not (run_dir / ".hydra").is_dir() or _value_of("hydra.output_subdir", words) is not None:
        return []
    return [f"hydra.output_subdir=.hydra/resume-{resumes_of(run_dir) + 1}"]


def _still_meant(earlier: list[str], today: list[str], run_dir: Path) -> list[str]:
    """The overrides of the earlier run in `run_dir` that today's leave in force.

    One of the same key is replaced. A group that is chosen anew takes with it what was set below the old choice; a
    strategy, which brings its natural sharding, takes the sharding as well.
    """
    keys = {_key(word) for word in today}
    chosen = {key for key in keys if "." not in key}
    if "strategy" in chosen:
        chosen.add("sharding")
    left = [word for word in earlier if _key(word) not in keys | chosen and _key(word).split(".")[0] not in chosen]
    refuse_what_chooses_code(left, run_dir)
    return left


def _key(word: str) -> str:
    """Of an override: what it sets, without Hydra's + and ~ and @package."""
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def _value_of(key: str, words: list[str]) -> str | None:
    """The last value that the words give to a key, without quotes."""
    values = [word.partition("=")[2] for word in words if "=" in word and _key(word) == key]
    return values[-1].strip("'\"") if values else None


def _quoted(value: str) -> str:
    """A value as Hydra's grammar takes it."""
    return value if re.fullmatch(r"[\w/.~-]+", value) else "'" + value.replace("'", "\\'") + "'"


@functools.cache
def newest(folder: Path) -> tuple[Path | None, tuple[str, ...]]:
    """`newest_whole`, which reads every byte, once for the check and the start."""
    found, damaged = newest_whole(folder)
    return found, tuple(damaged)


def problems(resume: str | None, source: str | None, is_sweep: bool) -> list[str]:
    """What is wrong with checkpoint.resume and task.checkpoint, whose values these are."""
    if is_sweep and resume not in (None, AUTO):
        return [
            f"{KEY}={resume} names one run, and -m starts several. Use {KEY}={AUTO} with the sweep's hydra.sweep.dir."
        ]
    found = [] if resume in (None, AUTO) else _target_problems(KEY, str(resume))
    return found + ([] if source in (None, "???") else _target_problems(SOURCE_KEY, str(source)))


def _target_problems(key: str, value: str) -> list[str]:
    target, checkpoint = split_target(Path(value))
    if not target.is_dir() or not (checkpoint or target).is_dir():
        return [f"{key}={value} does not exist. Name a run folder, or a checkpoint in its {FOLDER}/."]
    if earlier_overrides(target) is None:
        return [f"{key}={value} is no run folder: it has no .hydra/overrides.yaml. Name one that train.py made."]
    if checkpoint is not None:
        return [f"{key}: {line} Name another." for line in check(checkpoint)]
    found, damaged = newest((target / FOLDER).resolve())
    if found is None:
        why = f" {' '.join(damaged)}" if damaged else ""
        return [f"{key}={value} holds no whole checkpoint.{why} Name another run, or train one with checkpoint.every."]
    return []


def may_hold_a_run(resume: str | None, run_dir: Path) -> bool:
    """Whether this run goes on in `run_dir`, which then holds one already."""
    if resume == AUTO:
        return True
    if resume is None:
        return False
    target, checkpoint = split_target(Path(resume))
    return checkpoint is None and target.resolve() == run_dir.resolve()


def chosen(target: str | None, run_dir: Path) -> Path | None:
    """The checkpoint that checkpoint.resume or task.checkpoint means; None where there is none to load."""
    if target is None:
        return None
    folder, checkpoint = (run_dir, None) if target == AUTO else split_target(Path(target))
    return checkpoint or newest((folder / FOLDER).resolve())[0]


def continuation(resume: str | None, run_dir: Path) -> dict[str, Any]:
    """What the ranks are told of the run that this one goes on with.

    {"resume": checkpoint, "run_id", "wandb_id", "resumes": how many times now, "passed_over": damaged ones}.
    """
    if resume is None:
        return {}
    if not may_hold_a_run(resume, run_dir):
        target, checkpoint = split_target(Path(resume))
        found = checkpoint or newest((target / FOLDER).resolve())[0]
        assert found is not None, "refused by `problems`"
        return {"resume": str(found.resolve())}
    found, damaged = newest((run_dir / FOLDER).resolve())
    told: dict[str, Any] = {"resumes": resumes_of(run_dir), "passed_over": list(damaged), "resume": None}
    if found is not None:
        told |= {"resume": str(found), "run_id": read_manifest(found).run}
    ids = [match[1] for path in sorted(run_dir.glob("wandb/*run-*")) if (match := _WANDB_RUN.fullmatch(path.name))]
    return {**told, "wandb_id": ids[-1]} if ids else told


def is_finished(run_dir: Path) -> bool:
    """Whether a run in this folder has come to its end."""
    try:
        return bool(json.loads((run_dir / "summary.json").read_text())["status"] == "finished")
    except (OSError, ValueError, KeyError):
        return False


def differing_job(run_dir: Path, overrides: list[str]) -> list[str]:
    """Of a sweep that is started again: whether this job's folder was made for something else."""
    earlier = earlier_overrides(run_dir)
    today = [word for word in overrides if _key(word) != KEY and not _key(word).startswith("hydra.")]
    if earlier is None or sorted(earlier) == sorted(today):
        return []
    return [
        f"{run_dir} holds a job of other overrides ({' '.join(earlier) or 'none'}; now {' '.join(today) or 'none'})."
        " Start the same sweep again, or another in a folder of its own."
    ]
