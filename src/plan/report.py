"""What a plan shows: a rank's parts with the arithmetic behind them, and what a step sends."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from src.footprint import NOT_COUNTED, Footprint, Part
from src.memory import memory
from src.plan.formula import Planned
from src.plan.traffic import step_traffic
from src.strategies.base import Setting

if TYPE_CHECKING:
    from rich.table import Table

#: Where the rules come from, beside the strategies' own code.
SOURCES = (
    "Model states: ZeRO, Rajbhandari et al. 2020, section 3 (Adam: 16 bytes a parameter; 18 where fp32 gradients stand"
    " beside 16-bit weights). Activations: this model's operations, gone through on tensors without memory (a GPT's"
    " layer keeps s b h (16 e + 2) bytes of e-byte elements with fused attention, after Korthikanti et al. 2022)."
    " Buffers: each engine's code, held against measured steps."
)


def memory_table(planned: Planned, setting: Setting, num_kinds: int) -> "Table":
    """A row a part: a rank's and all ranks' bytes, and the formula. num_kinds: kinds of rank; this is the fullest."""
    from rich.table import Table

    of = f"rank {planned.world_rank}, the fullest of {num_kinds} kinds" if num_kinds > 1 else "each rank"
    made = Table(title=f"memory of {of} of {setting.world_size}, by formula", title_justify="left")
    made.add_column("part")
    made.add_column("a rank", justify="right")
    made.add_column("in total", justify="right")
    made.add_column("formula (bytes)")
    found = planned.footprint

    def row(name: str, part: Any, **style: Any) -> None:
        total = memory(part.bytes * setting.world_size) if num_kinds == 1 else "-"
        made.add_row(name.replace("_", " "), memory(part.bytes), total, part.formula, **style)

    for name, part in found.parts().items():
        row(name, part)
    made.add_section()
    row("peak", found.peak, style="bold")
    if found.host.bytes:
        row("in the host's memory", found.host)
    return made


def traffic_table(traffic: Mapping[str, Part]) -> "Table":
    """Bytes of a step by collective. traffic: of `step_traffic`."""
    from rich.table import Table

    made = Table(title="communication of a rank in a step", title_justify="left")
    made.add_column("collective")
    made.add_column("MB (10⁶ bytes)", justify="right")
    made.add_column("formula (bytes)")
    for name, part in traffic.items():
        made.add_row(name, f"{part.bytes / 1e6:,.3f}", part.formula)
    return made


def words(found: Footprint, device_memory_bytes: float | None) -> str:
    """What the tables don't say."""
    lines = [
        "Each part is the most there is of it; the peak is the largest moment, so less than their sum.",
        f"Not counted: {NOT_COUNTED}.",
        SOURCES,
    ]
    if device_memory_bytes is not None:
        room = device_memory_bytes - found.peak.bytes
        verdict = f"fits, with {memory(room)} to spare" if room >= 0 else f"does not fit: {memory(-room)} too much"
        lines.append(f"On devices of {device_memory_bytes / 2**30:g} GiB it {verdict}.")
    return "\n".join(lines)


def record(planned: Planned, setting: Setting) -> dict[str, Any]:
    """A rank's plan in plain types, for files."""
    found = planned.footprint
    return {
        "world_rank": planned.world_rank,
        "method": "formula",
        "parameters": planned.sizes.num_parameters,
        "bytes": {name: part.bytes for name, part in found.parts().items()}
        | {"host": found.host.bytes, "model_states": found.model_states, "peak": found.peak.bytes},
        "formulas": {name: part.formula for name, part in found.parts().items()} | {"peak": found.peak.formula},
        "traffic_bytes": {name: part.bytes for name, part in step_traffic(found, setting).items()},
        "flops": planned.sizes.flops,
    }
