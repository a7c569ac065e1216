"""Building parts of an experiment on trial before anything starts: what costs little, the model without memory."""

import os
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from hydra.utils import instantiate

from src.checks.positions import gives_positions
from src.checks.setting import num_local_ranks, task_class
from src.data.base import Data
from src.errors import Refused, in_words
from src.memory import memory
from src.schedule import Schedule
from src.strategies.base import Strategy
from src.tracking.base import Tracker
from src.weights import is_unread

#: What a part must be where that is known.
KINDS: dict[str, type] = {"model": torch.nn.Module, "schedule": Schedule, "strategy": Strategy, "tracking": Tracker}


def prepare(config: dict[str, Any]) -> None:
    """Fetch the data once, and build what costs little, so that a bad value is refused rather than fails.

    Raises Refused. The parent calls this before any rank starts.
    """
    found: list[str] = []
    model: Any = None
    for key in ("schedule", "strategy", "tracking", "task", "model", "optimizer"):
        try:
            part: Any = on_meta(config[key]) if key == "model" else built(key, config[key])
            model = part if key == "model" else model
            if (kind := KINDS.get(key)) is not None and not isinstance(part, kind | NoneType):
                what = f"a {type(part).__name__}, where a {kind.__name__} belongs"
                found.append(f"{key} ({config[key]['_target_']}) builds {what}. Correct {key}._target_.")
            elif key == "optimizer":
                try_optimizer(part)
            elif key == "model" and part is not None and task_class(config).ranks == "started":
                found += _memory_problems(part, config)
                if hasattr(part, "data_problems"):
                    found += part.data_problems(config["data"], gives_positions(config["data"]))
                if task_class(config).trains and not any(p.requires_grad for p in part.parameters()):
                    found.append(
                        f"model {config['model']['_target_']} has no parameter that asks for a gradient, so nothing can"
                        " be trained. Unfreeze some, or use task=evaluate."
                    )
        except Refused as refused:
            found += refused.problems
    if found:
        raise Refused(*found)
    if hasattr(model, "prepare") and task_class(config).ranks == "started":
        model.prepare()  # before the data, whose tokenizer may come with it
    data = built("data", config["data"])
    if not isinstance(data, Data):
        raise Refused(f"data ({config['data']['_target_']}) builds a {type(data).__name__}; see src/data/base.py.")
    if task_class(config).ranks == "imagined" and data.example(1) is None:
        raise Refused(
            f"data {config['data']['_target_']} tells no micro-batch's shapes without reading samples, so nothing can"
            " be planned. Use data=synthetic_images or data=synthetic_tokens of the same shapes, or give the class an"
            " example() (src/data/base.py)."
        )
    if task_class(config).reads_data:
        data.prepare()


def on_meta(node: dict[str, Any]) -> Any:
    """A model's shapes without its memory; None where it can't be built like that. Raises Refused for bad values."""
    with torch.device("meta"):
        return built("model", node)


def _memory_problems(model: torch.nn.Module, config: dict[str, Any]) -> list[str]:
    """A model whose bare weights, drawn once a rank in the host's memory, can't fit this machine, whatever shards them.

    model: on meta. Says nothing of what training takes beyond the weights. Of one that is read, rank 0 alone has to
    hold all of them.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    ranks = 1 if is_unread(model) else num_local_ranks(config)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights * ranks <= available:
        return []
    return [
        f"model {config['model']['_target_']} has {sum(p.numel() for p in model.parameters()):,} parameters:"
        f" {memory(weights)} of weights for each of {ranks} rank(s), on a machine of {memory(available)}."
        " Use a smaller model, fewer ranks a machine (launch.nproc), or a larger machine."
    ]


def try_optimizer(optimizer: Callable[..., Any]) -> None:
    """Raises Refused where it takes no parameter as it is configured."""
    # The first optimizer of a process imports torch._dynamo (2 s). Here the ranks inherit it.
    try:
        optimizer([torch.nn.Parameter(torch.zeros(1))])
    except Exception as error:  # whatever a constructor makes of values that it did not expect
        raise Refused(f"optimizer can't be built: {in_words(error)}. Correct the optimizer's values.") from error


def built(key: str, node: dict[str, Any]) -> Any:
    """A part from its node; None for a model that fails of no bad value. Raises Refused, in a line of its own."""
    try:
        return instantiate(node, _convert_="all")
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, Refused):
            raise cause from error
        if key == "model" and not isinstance(cause, ValueError | TypeError):
            return None  # what can't be built without memory (it reads a tensor's values) the ranks build for real
        raise Refused(f"{key} ({node['_target_']}) can't be built: {in_words(cause)}") from error
