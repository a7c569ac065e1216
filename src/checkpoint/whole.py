"""Which checkpoints in a folder are whole. Reads only, and no file that a manifest does not name."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open

from src.checkpoint.failures import CheckpointDamaged
from src.checkpoint.manifest import SUFFIX, FileInfo, Manifest, file_digest, read_manifest

#: Names hold nothing that Hydra's command line or a shell would want quoted.
STEP_NAME = re.compile(r"step_([0-9]{8,})")
LAST, BEST = "last", "best"
FOLDER = "checkpoints"  # of a run folder
READERS = 4  # files whose digests are computed at once


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name tells; None for a folder that is none of ours."""
    match = STEP_NAME.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and step_name(step) == name else None


def checkpoints(folder: Path) -> list[Path]:
    """The folders named like checkpoints, newest first by number, whole or not. Empty where `folder` does not exist."""
    if not folder.is_dir():
        return []
    steps = [(step, path) for path in folder.iterdir() if (step := step_of(path.name)) is not None and path.is_dir()]
    return [path for _, path in sorted(steps, reverse=True)]


def check(checkpoint: Path, contents: bool = True) -> list[str]:
    """What is wrong with a checkpoint, a sentence a fault; empty for a whole one.

    contents: compare digests too, which reads every byte, and what the files say of themselves; without, only sizes.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointDamaged as error:
        return [str(error)]
    problems = []
    named = step_of(checkpoint.name)
    if named is not None and named != manifest.step:
        problems.append(f"{checkpoint} has been renamed: its manifest is of step {manifest.step}.")
    if more := sorted(path.name for path in checkpoint.glob(f"*{SUFFIX}") if path.name not in manifest.files):
        problems.append(f"{checkpoint / more[0]} is not in the manifest; somebody else put it there.")
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(
            lambda name: _file_problem(checkpoint / name, manifest.files[name], contents), manifest.files
        )
        problems += [problem for problem in found if problem]
    return problems or (_header_problems(checkpoint, manifest) if contents else [])


def _file_problem(path: Path, info: FileInfo, contents: bool) -> str | None:
    if not path.is_file():
        return f"{path} is missing."
    try:
        size = path.stat().st_size
        if size != info.bytes:
            return f"{path} is {'truncated' if size < info.bytes else 'too long'}: it has {size} of {info.bytes} bytes."
        if contents and file_digest(path) != info.digest:
            return f"{path} has changed since it was written: its digest differs from the manifest's."
    except OSError as error:  # a disk with a bad spot; another checkpoint may be sound
        return f"{path} can't be read: {error}."
    return None


def _header_problems(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Whether the files hold all of the tensors. A digest only shows that a file is the one that its writer vouched
    for, whoever that was."""
    elements = dict.fromkeys(manifest.tensors, 0)
    for name in manifest.files:
        try:
            with safe_open(checkpoint / name, framework="numpy") as file:
                for tensor in file.keys():  # noqa: SIM118 - no mapping
                    elements[tensor] = elements.get(tensor, 0) + math.prod(file.get_slice(tensor).get_shape())
        except (SafetensorError, OSError) as error:
            return [f"{checkpoint / name} can't be read: {error}."]
    missing = [name for name, info in manifest.tensors.items() if elements[name] != math.prod(info.shape)]
    return [f"{checkpoint} does not hold all of {missing[0]}: its files don't fit its manifest."] if missing else []


def whole_checkpoints(folder: Path, contents: bool = False) -> list[Path]:
    """The whole checkpoints of a folder, newest first by number. contents: as in `check`."""
    return [path for path in checkpoints(folder) if not check(path, contents)]


def newest_whole(folder: Path, contents: bool = True) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, None where there is none, and what is wrong with each newer one.

    The pointer `last` is not asked: a run that was killed between publishing and pointing has a newer one.
    """
    words: list[str] = []
    for path in checkpoints(folder):
        problems = check(path, contents)
        if not problems:
            return path, words
        words += problems
    return None, words


def find(target: Path) -> Path:
    """The checkpoint that a run folder (its newest whole one), a checkpoint's own folder or a pointer file means.

    Raises FileNotFoundError, or CheckpointDamaged with what is wrong with it.
    """
    if target.name in (LAST, BEST) and target.is_file():
        target = pointed(target.parent, target.name) or target
    if step_of(target.name) is not None:
        problems = check(target)
        if problems:
            raise CheckpointDamaged(" ".join(problems))
        return target
    found, damaged = newest_whole(target / FOLDER)
    if found is None:
        raise FileNotFoundError(f"{target} holds no whole checkpoint. {' '.join(damaged)}".rstrip())
    return found


def pointed(folder: Path, pointer: str) -> Path | None:
    """The checkpoint that the file `last` or `best` names; None where there is no such file, or no such checkpoint."""
    path = folder / pointer
    if not path.is_file():
        return None
    name = path.read_text(errors="replace").strip()
    target = folder / name
    return target if step_of(name) is not None and target.is_dir() else None
