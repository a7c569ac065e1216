"""Over how many ranks each collective of a footprint goes, which its time depends on."""

from src.strategies.base import Setting
from src.strategies.footprint import shares_of

#: Behind the name of a collective that goes over the ranks that share each layer.
LAYERS = " (layers)"


def ring_size(collective: str, setting: Setting) -> int:
    """Ranks that take part in a collective of a footprint, by its name there.

    Split layers stay on their own axis. Shards are gathered and reduced by those that share a copy; under hybrid
    sharding the copies' shards are summed between the copies.
    """
    operation = operation_of(collective)
    if operation == "send_recv":
        return 2
    if collective.endswith(LAYERS):
        return int(setting.arguments.get("tp", 2))
    sharing = shares_of(setting).optimizer
    if sharing == 1:
        return setting.data_parallel_size  # whole copies, whatever the operation that a compressor makes of their sum
    return setting.data_parallel_size // sharing if operation == "all_reduce" else sharing


def operation_of(collective: str) -> str:
    """As nccl-tests name it."""
    name = collective.removesuffix(LAYERS)
    return {"send": "send_recv"}.get(name, name)
