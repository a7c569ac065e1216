"""Whether a checkpoint fits the model and the optimizer of today's configuration, before any rank starts."""

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

from src.checkpoint.manifest import Manifest, read_manifest
from src.checks.trial import on_meta

MAX_NAMED = 3  # tensors that a line names


def fit_problems(config: dict[str, Any], checkpoint: Path, for_training: bool) -> list[str]:
    """Why the ranks could not load `checkpoint`, a line for the model and one for the optimizer.

    config: plain, resolved and checked. for_training: whether the optimizer's states are loaded as well.
    """
    manifest = read_manifest(checkpoint)
    found = _model_problems(config, checkpoint, manifest)
    return found + _optimizer_problems(config, checkpoint, manifest) if for_training else found


def _model_problems(config: dict[str, Any], checkpoint: Path, manifest: Manifest) -> list[str]:
    model = on_meta(config["model"])
    if model is None:  # it can't be built without memory; the ranks will say it
        return []
    persistent = model.state_dict().keys()
    tensors = [*model.named_parameters(), *(item for item in model.named_buffers() if item[0] in persistent)]
    here = {f"model.{name}": tuple(tensor.shape) or (1,) for name, tensor in tensors}
    there = {name: info.shape for name, info in manifest.tensors.items() if name.startswith("model.")}
    words = [
        f"{name.removeprefix('model.')} ({_shown(there.get(name))} in the checkpoint, {_shown(here.get(name))} here)"
        for name in sorted(here.keys() | there.keys())
        # A tied weight may stand there under its other name as well.
        if there.get(name) != here.get(name) and (name in here or name.removeprefix("model.") not in persistent)
    ]
    if not words:
        return []
    more = f" and {len(words) - MAX_NAMED} more" if len(words) > MAX_NAMED else ""
    return [
        f"{checkpoint} was written by another model than {config['model']['_target_']} as it is configured here:"
        f" {', '.join(words[:MAX_NAMED])}{more}. Leave model and data as they were, or start a new run."
    ]


def _optimizer_problems(config: dict[str, Any], checkpoint: Path, manifest: Manifest) -> list[str]:
    saved = {name.rsplit(".", 1)[1] for name in manifest.tensors if name.startswith("optimizer.")}
    slots = _slots(config["optimizer"])
    if saved == slots:
        return []
    there, here = (" and ".join(sorted(names)) or "nothing" for names in (saved, slots))
    return [
        f"{checkpoint} holds {there} of its optimizer, and {config['optimizer']['_target_']} keeps {here}."
        " Leave the optimizer as it was, or start a new run."
    ]


def _slots(node: dict[str, Any]) -> set[str]:
    """What an optimizer keeps beside each parameter, but for the count of steps; learnt from a step."""
    probe = torch.nn.Parameter(torch.ones(2, 2))
    probe.grad = torch.zeros_like(probe)
    optimizer = instantiate(node, _convert_="all")([probe])
    optimizer.step()
    return {slot for slot in optimizer.state[probe] if slot != "step"}


def _shown(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(list(shape))
