"""Random numbers on ranks that share a computation: equal where activations are copies, different where they are parts.

Megatron-LM (Shoeybi et al. 2019, section 3) does the same with two states of the generator. Here the second is drawn
from the first, so nothing beside the default generator has to be kept or saved.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


def own_draws(module: nn.Module, number: int, device_type: str) -> None:
    """Let `module` draw (dropout) from a stream of its own in training: one for each `number`, new at each call.

    The ranks that share the default generator's state go on sharing it afterwards. number: this rank's place among
    those that must differ.
    """
    forks: list[AbstractContextManager[Any]] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        if module.training:
            # Drawn on the CPU, whatever the device: nobody waits, and all ranks move on by one number alike.
            shared = int(torch.randint(2**31, (1,)))
            fork = torch.random.fork_rng([torch.cuda.current_device()] if device_type == "cuda" else [])
            fork.__enter__()
            forks.append(fork)
            seed = shared + (number << 31)
            # torch.manual_seed would format a stack trace, 0.1 ms, for the devices that it does not find.
            torch.default_generator.manual_seed(seed)
            if device_type == "cuda":
                torch.cuda.manual_seed(seed)

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if forks:
            forks.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    # Prepended, so that several streams on one module are left in the opposite order.
    module.register_forward_hook(leave, prepend=True, always_call=True)
