"""What the environment says of the ranks: whether torchrun started this process, and how many cores it may use.

Imports no torch: the command line asks before it knows whether it will need any.
"""

import os
from typing import NamedTuple

from src.errors import Refused

#: What torchrun gives every process it starts; all of it, or it was not torchrun.
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

MAX_PORT = 65535


class Ranks(NamedTuple):
    """One process's numbers."""

    world_rank: int
    world_size: int
    local_rank: int
    local_size: int


def num_cores() -> int:
    """The cores this process may run on, which in a container or under taskset are fewer than the machine's."""
    return len(os.sched_getaffinity(0))


def torchrun_ranks() -> Ranks | None:
    """This process's numbers under torchrun; None where nobody set any. Refuses a half-set environment."""
    found = {name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ}
    # MASTER_ADDR and MASTER_PORT alone are often exported in a shell's profile; they start nothing.
    if not found.keys() - {"MASTER_ADDR", "MASTER_PORT"}:
        return None
    missing = [name for name in TORCHRUN_VARIABLES if name not in found]
    if missing:
        raise Refused(
            f"the environment sets {', '.join(sorted(found))} but not {', '.join(missing)}: half a torchrun"
            " environment. Start with torchrun, or unset them to let train.py start its own ranks."
        )
    for name in TORCHRUN_VARIABLES:
        if name != "MASTER_ADDR" and not (found[name].isascii() and found[name].isdigit()):
            raise Refused(
                f"{name}={found[name]!r} in the environment is not a number. Start with torchrun, or unset it."
            )
    if int(found["MASTER_PORT"]) > MAX_PORT:
        raise Refused(f"MASTER_PORT={found['MASTER_PORT']} is no port; the largest is {MAX_PORT}. Start with torchrun.")
    if int(found["MASTER_PORT"]) == 0:
        # torchrun hands --master-port=0 on as it is, and its ranks then look for one another for ever.
        raise Refused("MASTER_PORT=0 is no port to meet at. Use torchrun --standalone, which finds a free one.")
    ranks = Ranks(*(int(found[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    if ranks.world_rank >= ranks.world_size or ranks.local_rank >= ranks.local_size:
        raise Refused(
            f"RANK={ranks.world_rank} of WORLD_SIZE={ranks.world_size} and LOCAL_RANK={ranks.local_rank} of"
            f" LOCAL_WORLD_SIZE={ranks.local_size} in the environment can't be. Start with torchrun, or unset them."
        )
    return ranks


def restart_count() -> int:
    """How often the ranks of this run have been started again after a failure, by torchrun or by our own parent."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if "RANK" in os.environ else 0
