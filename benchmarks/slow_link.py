"""What compressing gradients is worth on a slow link: a step of train.py between two hosts, by link and by compression.

The hosts are two network namespaces of this machine, joined by a cable of 100 Mbit/s, 1 Gbit/s, or as fast as it
copies; torchrun starts one rank in each. Every run trains the same MLP of 21 million parameters on the same digits in
the same order. Step seconds are medians after a warm-up; bytes are what the first host's interface sent, beside what
the run's own ledger says. On the unlimited link the runs go on for longer, for the loss after the same samples.

    sudo env PYTHONPATH=. python benchmarks/slow_link.py [--quick] [--out FOLDER]      (all of it: sudo make slow-link)

Linux, root and iproute2; under 15 minutes on two cores, --quick under 3. Leaves slow_link.json and slow_link.html.
Exit code 1 where Top-K misses its bar on the slowest link, or a run fails.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.link_counter import FILE as COUNTS
from benchmarks.slow_link_report import Row, draw, show, too_slow
from benchmarks.two_hosts import ADDRESSES, INTERFACE, HostFailed, Link, TwoHosts, refuse_without_means, stoppable
from src.errors import Refused

REPOSITORY = Path(__file__).resolve().parent.parent
LINKS = (Link("100 Mbit/s", 100), Link("1 Gbit/s", 1000), Link("unlimited", None))
DENSE = "dense"
DENSE_STEPS = 2  # torch's PowerSGD begins after two at the earliest; the warm-up is longer
RUN_SECONDS = 420.0  # a run that takes longer hangs
MEETING_SECONDS = 60  # how long torchrun waits for the other host
PORT = 29400  # free: nobody else is in the namespace

#: 64·2304 + 4·2304² + 2304·10 weights and 5·2304 + 10 biases: 21.4 million parameters, 86 MB of gradients in fp32.
MODEL = ("data=digits", "model=mlp", "model.hidden=[2304,2304,2304,2304,2304]")
TRAINING = (
    *("strategy=ddp", "optimizer=sgd", "optimizer.lr=0.02", "optimizer.fused=true"),
    *("trainer.micro_batch_size=16", "trainer.epochs=1000", "trainer.eval_every=1000000", "trainer.log_every=1"),
)


@dataclass(frozen=True)
class Variant:
    """overrides: what it adds to the command line."""

    name: str
    overrides: tuple[str, ...]


#: A threshold from a sample: an exact choice among 21 million numbers takes a CPU longer than a fast link's all-reduce.
TOPK = ("compression=topk", "compression.ratio=0.01", "compression.selection=sampled")
VARIANTS = (
    Variant(DENSE, ("compression=none",)),
    Variant("fp16", ("compression=fp16",)),
    Variant("bf16", ("compression=bf16",)),
    Variant("PowerSGD", ("compression=powersgd", f"compression.warmup_steps={DENSE_STEPS}")),
    Variant("Top-K 1 %", TOPK),
    Variant("Top-K 1 %, no feedback", (*TOPK, "compression.error_feedback=false")),
)
QUICK = (DENSE, "fp16", "Top-K 1 %")


@dataclass(frozen=True)
class Lengths:
    """Optimizer steps: before the measured ones, measured, and of a run for its loss (None: no longer run)."""

    warm_up: int
    measured: int
    for_loss: int | None

    def steps(self, link: Link) -> int:
        short = self.warm_up + self.measured
        return short if link.mbit_per_second is not None or self.for_loss is None else max(short, self.for_loss)


def overrides(variant: Variant, steps: int, run_dir: Path) -> list[str]:
    """The command line of train.py."""
    counter = ["tracking=off", "tracking._target_=benchmarks.link_counter.LinkCounter"]
    counter.append(f"+tracking.interface={INTERFACE}")
    folder = ["launch.device=cpu", f"trainer.max_steps={steps}", f"hydra.run.dir={run_dir}"]
    return [*MODEL, *TRAINING, *variant.overrides, *counter, *folder]


def torchrun(host: int, logs: Path) -> list[str]:
    """torchrun's command on a host, the first of which holds the rendezvous.

    It is told so: by its name it would not know itself, which stands for the machine's address outside.
    """
    conf = f"is_host={host == 0},join_timeout={MEETING_SECONDS}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-id", "slow-link"]
    meeting += ["--rdzv-conf", conf]
    ranks = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", ADDRESSES[host], "--log-dir", str(logs)]
    return [sys.executable, "-m", "torch.distributed.run", *ranks, *meeting]


def environment(folder: Path) -> dict[str, str]:
    """The hosts': gloo on the cable, half of the cores each, temporary files in `folder`."""
    threads = max(1, len(os.sched_getaffinity(0)) // len(ADDRESSES))
    own = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPOSITORY)}
    return {**os.environ, **own, "TMPDIR": str(folder)}


def measure(hosts: TwoHosts, variant: Variant, lengths: Lengths, folder: Path) -> Row:
    """One training run between the hosts. folder: empty, for the run's files."""
    run_dir, steps = folder / "run", lengths.steps(hosts.link)
    words = overrides(variant, steps, run_dir)
    commands = [[*torchrun(host, folder / f"ranks{host}"), str(REPOSITORY / "train.py"), *words] for host in (0, 1)]
    logs = [folder / f"host{host}.log" for host in (0, 1)]
    hosts.run(commands, logs, folder, environment(folder), RUN_SECONDS)
    return read_row(hosts.link.name, variant.name, run_dir, lengths)


def read_row(link: str, variant: str, run_dir: Path, lengths: Lengths) -> Row:
    """The figures of a run's folder, of the steps after the warm-up."""
    records = _lines(run_dir / "metrics.jsonl", "train")
    counts = {line["step"]: line["sent_bytes"] for line in _lines(run_dir / COUNTS)}
    summary = json.loads((run_dir / "summary.json").read_text())
    measured, last = records[lengths.warm_up :], records[-1]["step"]
    sent_by_ledger = [record["sent_bytes"] for record in measured if "sent_bytes" in record]
    return Row(
        link=link,
        variant=variant,
        parameters=summary["parameters"],
        step_seconds=[record["step_seconds"] for record in measured],
        sent_bytes=(counts[last] - counts[lengths.warm_up]) / (last - lengths.warm_up),
        ledger_bytes=statistics.mean(sent_by_ledger) if sent_by_ledger else None,
        losses=[record["loss"] for record in records],
        samples=summary["samples"],
        test_loss=summary["eval"]["loss"],
        test_accuracy=summary["eval"]["accuracy"],
    )


def _lines(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    found = map(json.loads, path.read_text().splitlines())
    return [line for line in found if kind is None or line["kind"] == kind]


def walk(links: Sequence[Link], variants: Sequence[Variant], lengths: Lengths) -> list[Row]:
    """Every variant over every link; what a run leaves in its folder goes with it."""
    rows = []
    for link in links:
        with TwoHosts(link) as hosts:
            for variant in variants:
                with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
                    before = time.monotonic()
                    rows.append(measure(hosts, variant, lengths, Path(folder)))
                row, seconds = rows[-1], time.monotonic() - before
                print(
                    f"{link.name:>10}  {variant.name:<22} {row.median_seconds:7.3f} s a step,"
                    f" {row.sent_bytes / 1e6:7.2f} MB sent  (run of {seconds:.0f} s)",
                    flush=True,
                )
    return rows


def machine() -> str:
    """What it is measured on, and what else it does: compressing competes for the cores, sending does not."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    busy = ", BUSY with other work: what computes is slower than it need be" if load > cores else ""
    return f"{cores} cores shared by both hosts, Linux {platform.release()}, load {load:.1f} when begun{busy}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} only, few steps; no 1 Gbit/s")
    parser.add_argument("--only", nargs="+", choices=[v.name for v in VARIANTS], help="these, and dense")
    parser.add_argument("--links", nargs="+", choices=[link.name for link in LINKS], help="these only")
    parser.add_argument(
        "--out", type=Path, help="where the JSON and the picture go (default multirun/slow_link-<time>)"
    )
    return parser.parse_args()


def main() -> int:
    given = options()
    names = given.only or (QUICK if given.quick else [variant.name for variant in VARIANTS])
    variants = [variant for variant in VARIANTS if variant.name in (DENSE, *names)]
    wanted = given.links or [link.name for link in LINKS if not given.quick or link.mbit_per_second != 1000]
    links = [link for link in LINKS if link.name in wanted]
    lengths = Lengths(2, 2, for_loss=None) if given.quick else Lengths(3, 5, for_loss=92)
    out = given.out or REPOSITORY / "multirun" / time.strftime("slow_link-%Y-%m-%d_%H-%M-%S")
    conditions, began = machine(), time.monotonic()
    try:
        with stoppable():
            refuse_without_means()
            out.mkdir(parents=True, exist_ok=True)
            rows = walk(links, variants, lengths)
    except Refused as refused:
        print(f"slow_link: {refused}", file=sys.stderr)
        return 2
    except HostFailed as failed:
        print(f"slow_link: {failed}", file=sys.stderr)
        return 1
    show(rows, conditions)
    facts = {"conditions": conditions, "warm_up_steps": lengths.warm_up, "seconds": time.monotonic() - began}
    (out / "slow_link.json").write_text(json.dumps({**facts, "rows": [row.as_dict() for row in rows]}, indent=1))
    draw(rows, conditions, out / "slow_link.html")
    print(f"{facts['seconds']:.0f} s in all; {out / 'slow_link.json'}, {out / 'slow_link.html'}")
    missed = too_slow(rows)
    if missed:
        print(f"slow_link: the bar is missed by {', '.join(row.variant for row in missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
