"""task=formats: the float formats of training, from torch.finfo, checked against their bits."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from src.bench.formats import FORMATS, FormatReport, report
from src.run import Experiment
from src.task import Task
from src.tracking.tables import show


class Formats(Task):
    """Prints a table. Raises RuntimeError where torch and the bit layout disagree."""

    ranks = "one"
    reads_data = False
    is_tracked = False

    def __call__(self, experiment: Experiment) -> None:
        reports = [report(format) for format in FORMATS]
        for found in reports:
            experiment.reporter.record("format", asdict(found))
        experiment.reporter.update(world_size=1, formats={found.name: asdict(found) for found in reports})
        show(table(reports))
        wrong = [f"{found.name}: {line}" for found in reports for line in found.disagreements]
        if wrong:
            raise RuntimeError(f"torch and the bit layout disagree. {'; '.join(wrong)}")


def table(reports: list[FormatReport]) -> Table:
    """A row a format."""
    made = Table(title="float formats", title_justify="left")
    for column in ("format", "bits", "sign + exponent + mantissa bits", "largest", "smallest normal", "epsilon"):
        made.add_column(column, justify="left" if column == "format" else "right")
    made.add_column("from")
    made.add_column("bits decoded by torch")
    for found in reports:
        layout = f"1 + {found.exponent_bits} + {found.mantissa_bits}"
        numbers: list[Any] = [found.largest, found.smallest_normal, found.epsilon]
        made.add_row(
            found.name,
            str(found.bits),
            layout,
            *(f"{number:.7g}" for number in numbers),
            found.source,
            "differ" if found.disagreements else "agree",
        )
    return made
