"""What slow_link.py found, as a table, as sentences and as a picture."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REFERENCE = "dense"
BAR, BAR_LINK = 0.15, "100 Mbit/s"  # the most that a Top-K step may take of a dense one there


@dataclass(frozen=True)
class Row:
    """One run. step_seconds: of each measured step. sent_bytes: a measured step's mean, by the first host's interface;
    ledger_bytes: by the run's metrics, None where they say none. losses: of every step, nats; test_*: after the last.
    """

    link: str
    variant: str
    parameters: int
    step_seconds: list[float]
    sent_bytes: float
    ledger_bytes: float | None
    losses: list[float]
    samples: int
    test_loss: float
    test_accuracy: float

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.step_seconds)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "median_seconds": self.median_seconds}


def ratio(rows: Sequence[Row], row: Row) -> float:
    """A row's step over the dense one's on the same link."""
    [dense] = [other for other in rows if other.link == row.link and other.variant == REFERENCE]
    return row.median_seconds / dense.median_seconds


def names(rows: Sequence[Row], attribute: str) -> list[str]:
    """The links or variants, each once, in their order."""
    return list(dict.fromkeys(getattr(row, attribute) for row in rows))


def of(rows: Sequence[Row], variant: str) -> dict[str, Row]:
    """A variant's rows by link."""
    return {row.link: row for row in rows if row.variant == variant}


def longest(rows: Sequence[Row], variant: str) -> Row:
    """Its run of the most samples, whose loss says most."""
    return max(of(rows, variant).values(), key=lambda row: row.samples)


def same_everywhere(rows: Sequence[Row]) -> bool:
    """Whether each variant's losses are equal over all links, to the last bit, as far as all of its runs went."""
    for variant in names(rows, "variant"):
        runs = [row.losses for row in of(rows, variant).values()]
        common = min(map(len, runs))
        if any(run[:common] != runs[0][:common] for run in runs):
            return False
    return True


def sentences(rows: Sequence[Row], conditions: str) -> list[str]:
    """On what it was measured, and what came out, each a line."""
    first, num_steps = rows[0], min(len(row.step_seconds) for row in rows)
    equal = "equal to the last bit" if same_everywhere(rows) else "NOT equal"
    found = [
        f"Measured between two network namespaces of one machine: {conditions}. The links add no delay.",
        f"{first.parameters / 1e6:.1f} million parameters in fp32, a rank a host over gloo; seconds are medians"
        f" of {num_steps} or more steps, bytes what one host's interface sent.",
        f"Losses at the same step are {equal} over all links.",
    ]
    for row in rows:
        if row.variant.startswith("Top-K"):
            share = ratio(rows, row)
            bar = f" (bar: at most {BAR})" if row.link == BAR_LINK else ""
            found.append(f"{row.variant} on {row.link}: a step takes {share:.3f} of a dense one{bar}.")
    return found


def too_slow(rows: Sequence[Row]) -> list[Row]:
    """Those that miss the bar."""
    held = [row for row in rows if row.variant.startswith("Top-K") and row.link == BAR_LINK]
    return [row for row in held if ratio(rows, row) > BAR]


def table(rows: Sequence[Row]) -> Any:
    """A variant a line: seconds and share of dense by link, bytes by interface and ledger, loss."""
    from rich.table import Table

    made = Table("compression", title="a step between two hosts: seconds (of dense on the same link)")
    for link in names(rows, "link"):
        made.add_column(link, justify="right")
    longest_samples = max(row.samples for row in rows)
    for heading in ("MB sent", "by ledger", f"test loss after {longest_samples}", "accuracy"):
        made.add_column(heading, justify="right")
    for variant in names(rows, "variant"):
        by_link, last = of(rows, variant), longest(rows, variant)
        steps = [f"{row.median_seconds:.3f} (x {ratio(rows, row):.2f})" for row in by_link.values()]
        sent = next(iter(by_link.values()))
        ledger = "-" if sent.ledger_bytes is None else f"{sent.ledger_bytes / 1e6:.2f}"
        losses = [f"{last.test_loss:.4f}", f"{last.test_accuracy:.1%}"]
        made.add_row(variant, *steps, f"{sent.sent_bytes / 1e6:.2f}", ledger, *losses)
    return made


def show(rows: Sequence[Row], conditions: str) -> None:
    from rich.console import Console

    console = Console()
    # A log or a pipe is as wide as it needs to be.
    console = console if console.is_terminal else Console(width=140)
    console.print(table(rows))
    for line in sentences(rows, conditions):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def draw(rows: Sequence[Row], conditions: str, path: Path) -> None:
    """Step seconds by link, and the loss of the longest runs by samples, as a page that needs no network."""
    import plotly.graph_objects as go  # 0.3 s, and only this picture needs it
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("seconds a step", "training loss (nats) by samples, unlimited link"))
    for number, variant in enumerate(names(rows, "variant")):
        by_link, last = of(rows, variant), longest(rows, variant)
        seconds = [row.median_seconds for row in by_link.values()]
        said = [f"x {ratio(rows, row):.2f}" for row in by_link.values()]
        look = {"name": variant, "legendgroup": variant, "marker_color": qualitative.Plotly[number]}
        figure.add_trace(go.Bar(x=list(by_link), y=seconds, text=said, textposition="outside", **look), 1, 1)
        per_step = last.samples / len(last.losses)
        samples = [per_step * step for step in range(1, len(last.losses) + 1)]
        figure.add_trace(go.Scatter(x=samples, y=last.losses, mode="lines", showlegend=False, **look), 1, 2)
    title = f"a training step between two hosts, {rows[0].parameters / 1e6:.1f} million parameters"
    figure.update_layout(title={"text": title, "subtitle": {"text": f"{conditions}; numbers are shares of dense"}})
    figure.update_yaxes(type="log", title="seconds", row=1, col=1)
    figure.update_yaxes(type="log", row=1, col=2)
    figure.write_html(path, include_plotlyjs=True)
