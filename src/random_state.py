"""The state of every random number generator of a process, as tensors that a checkpoint can hold."""

import random
import struct

import numpy as np
import torch
from torch import Tensor

MERSENNE_WORDS = 624


def seed_all(seed: int, *words: int) -> None:
    """Seed python's, numpy's and torch's generators from `seed` and further numbers; alike at every start."""
    states = np.random.SeedSequence([seed, *words]).generate_state(4)
    random.seed(int(states[0]))
    np.random.seed(int(states[1]))
    torch.manual_seed(int(states[2]) << 32 | int(states[3]))


def random_states(device: torch.device) -> dict[str, Tensor]:
    """{"python", "numpy": int64, "torch", "cuda" (where the device is one): uint8}."""
    version, words, gauss = random.getstate()
    assert version == 3, version
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    states = {
        "python": _packed(words, gauss),
        "numpy": _packed(
            [*numpy["state"]["key"].tolist(), numpy["state"]["pos"]],
            numpy["gauss"] if numpy["has_gauss"] else None,
        ),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Take back what `random_states` gave."""
    words, gauss = _unpacked(states["python"])
    random.setstate((3, tuple(words), gauss))
    words, gauss = _unpacked(states["numpy"])
    key, position = np.array(words[:MERSENNE_WORDS], dtype=np.uint32), words[MERSENNE_WORDS]
    np.random.set_state(("MT19937", key, position, int(gauss is not None), gauss or 0.0))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _packed(words: "list[int] | tuple[int, ...]", gauss: float | None) -> Tensor:
    """Words, then whether a second normal number waits, then its bits."""
    bits = 0 if gauss is None else struct.unpack("<q", struct.pack("<d", gauss))[0]
    return torch.tensor([*words, int(gauss is not None), bits], dtype=torch.int64)


def _unpacked(tensor: Tensor) -> tuple[list[int], float | None]:
    *words, has_gauss, bits = tensor.tolist()
    return words, struct.unpack("<d", struct.pack("<q", bits))[0] if has_gauss else None
