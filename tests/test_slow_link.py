"""benchmarks/slow_link.py: what it reads, reckons and says; and, as root, real hosts over a real link."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import slow_link, two_hosts
from benchmarks.slow_link import LINKS, VARIANTS, Lengths, overrides, read_row, torchrun
from benchmarks.slow_link_report import Row, draw, ratio, same_everywhere, sentences, table
from benchmarks.two_hosts import ADDRESSES, INTERFACE, PREFIX, HostFailed, Link, TwoHosts, abandoned
from src.errors import Refused
from tests.command import REPOSITORY, environment
from tests.composing import composed
from tests.processes import wait_until

BENCHMARK = [sys.executable, "benchmarks/slow_link.py"]


def row(link: str, variant: str, seconds: float, losses: tuple[float, ...] = (2.0, 1.5)) -> Row:
    return Row(link, variant, 21_000_000, [seconds] * 3, 84e6, 83.5e6, list(losses), 64, 1.25, 0.5)


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """Skips, with the reason, where this machine makes no namespaces."""
    try:
        with TwoHosts(Link("probe", 100)):
            pass
    except Refused as refused:
        pytest.skip(str(refused))
    yield
    assert own_namespaces() == []


def own_namespaces(process: int | None = None) -> list[str]:
    """The namespaces of a process's benchmark; None: this one's."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    mine = f"{PREFIX}-{process or os.getpid()}-"
    return [line.split()[0] for line in listed.splitlines() if line.startswith(mine)]


# --- what it reckons ---


def test_the_model_has_more_than_20_million_parameters() -> None:
    config, problems = composed(*slow_link.MODEL)
    assert not problems
    widths = [64, *config["model"]["hidden"], 10]  # digits: 8x8 pixels, 10 classes
    assert sum(a * b + b for a, b in itertools.pairwise(widths)) == 21_415_690


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_no_variant_is_refused(variant: slow_link.Variant, tmp_path: Path) -> None:
    _, problems = composed(*overrides(variant, 8, tmp_path), "launch.nproc=2")
    assert problems == []


def test_only_unlimited_links_train_on_for_the_loss() -> None:
    assert [Lengths(3, 5, 92).steps(link) for link in LINKS] == [8, 8, 92]
    assert [Lengths(3, 2, None).steps(link) for link in LINKS] == [5, 5, 5]


def test_both_hosts_meet_at_the_first(tmp_path: Path) -> None:
    first, second = (" ".join(torchrun(host, tmp_path)) for host in (0, 1))
    for command in (first, second):
        assert f"--rdzv-endpoint {ADDRESSES[0]}:" in command
    assert f"--local-addr {ADDRESSES[0]}" in first
    assert "is_host=True" in first
    assert f"--local-addr {ADDRESSES[1]}" in second
    assert "is_host=False" in second


def test_a_hundredth_of_a_second_may_pass_at_once_and_never_less_than_two_packets() -> None:
    assert Link("", 1000).burst_bytes() == 1_250_000  # 10^9 bits / 8 * 0.01 s
    assert Link("", 100).burst_bytes() == 131_072  # 125 000 would cut into two of the kernel's packets of 64 KiB


def test_only_a_dead_benchmarks_namespaces_are_abandoned() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = [f"{PREFIX}-{dead.pid}-0", f"{PREFIX}-{os.getpid()}-0", f"{PREFIX}-else", "other"]
    assert abandoned(names) == names[:1]


def test_figures_are_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    records = [
        {"kind": "train", "step": step, "step_seconds": float(step), "loss": 3.0 - step, "sent_bytes": 10 * step}
        for step in (1, 2, 3, 4)
    ]
    counts = [{"step": step, "sent_bytes": total} for step, total in ((1, 1000), (2, 1100), (3, 1130), (4, 1180))]
    summary = {"parameters": 7, "samples": 128, "eval": {"loss": 0.5, "accuracy": 0.25}}
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*records, {"kind": "eval"}])))
    (tmp_path / "link.jsonl").write_text("\n".join(map(json.dumps, counts)))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    found = read_row("link", "variant", tmp_path, Lengths(2, 2, None))
    assert found.step_seconds == [3.0, 4.0]
    assert found.median_seconds == 3.5
    assert found.sent_bytes == 40  # (1180 - 1100) / 2 steps
    assert found.ledger_bytes == 35  # (30 + 40) / 2
    assert found.losses == [2.0, 1.0, 0.0, -1.0]


# --- what it says ---

ROWS = [
    row("100 Mbit/s", "dense", 8.0),
    row("100 Mbit/s", "Top-K 1 %", 0.8),
    row("unlimited", "dense", 0.2),
    row("unlimited", "Top-K 1 %", 0.5, (2.0, 1.5, 1.0)),
]


def test_a_step_is_compared_with_the_dense_one_on_the_same_link() -> None:
    assert [ratio(ROWS, each) for each in ROWS] == [1.0, 0.1, 1.0, 2.5]


def test_a_loss_that_depends_on_the_link_is_told() -> None:
    assert same_everywhere(ROWS)
    assert not same_everywhere([*ROWS[:3], row("unlimited", "Top-K 1 %", 0.5, (2.0, 1.4))])


def test_the_slowest_link_is_held_to_the_bar_and_the_others_are_reported_as_they_are() -> None:
    said = "\n".join(sentences(ROWS, "2 cores"))
    assert "between two network namespaces of one machine: 2 cores" in said
    assert "Top-K 1 % on 100 Mbit/s: a step takes 0.100 of a dense one (bar: at most 0.15)." in said
    assert "Top-K 1 % on unlimited: a step takes 2.500 of a dense one." in said


@pytest.mark.parametrize(("seconds", "code"), [(1.2, 0), (1.3, 1)])  # of 8 s: 0.15 and 0.1625
def test_a_missed_bar_fails_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, code: int
) -> None:
    rows = [ROWS[0], row("100 Mbit/s", "Top-K 1 %", seconds), *ROWS[2:]]  # faster links are held to none
    monkeypatch.setattr(slow_link, "refuse_without_means", lambda: None)
    monkeypatch.setattr(slow_link, "walk", lambda *_: rows)
    monkeypatch.setattr(sys, "argv", ["slow_link.py", "--out", str(tmp_path)])
    assert slow_link.main() == code
    assert ("missed by Top-K 1 %" in capsys.readouterr().err) == bool(code)


def test_the_table_has_a_line_a_variant_and_a_column_a_link() -> None:
    made = table(ROWS)
    assert made.row_count == 2
    assert [str(column.header) for column in made.columns][:3] == ["compression", "100 Mbit/s", "unlimited"]
    assert list(made.columns[1].cells) == ["8.000 (x 1.00)", "0.800 (x 0.10)"]


def test_the_picture_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    draw(ROWS, "2 cores", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script src=" not in page
    for words in ('"name":"dense"', '"name":"Top-K 1 %"', "x 0.10", "21.0 million parameters", "2 cores"):
        assert words in page


@pytest.mark.parametrize(("load", "is_busy"), [(0.5, False), (1000.0, True)])
def test_a_machine_that_has_other_work_is_said_to(monkeypatch: pytest.MonkeyPatch, load: float, is_busy: bool) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert ("BUSY" in slow_link.machine()) == is_busy


def test_without_root_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["slow_link.py", "--out", str(tmp_path / "out")])
    assert slow_link.main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "root" in line
    assert "sudo" in line
    assert not (tmp_path / "out").exists()


def test_processes_that_nothing_ends_are_told_of_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(two_hosts, "_processes", lambda name: [12345])
    monkeypatch.setattr(two_hosts, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(two_hosts, "KILL_SECONDS", 0.2)
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append(number))
    with pytest.raises(HostFailed, match=r"\[12345\] of stuck outlive SIGKILL"):
        two_hosts.end_processes("stuck")
    assert set(sent) == {signal.SIGTERM, signal.SIGKILL}


# --- real hosts ---


@pytest.mark.usefixtures("hosts")
def test_a_host_that_can_not_start_ends_the_one_that_has(tmp_path: Path) -> None:
    logs = [tmp_path / "first.log", tmp_path / "missing" / "second.log"]
    before = psutil.Process().children()  # other tests' workers
    with TwoHosts(Link("unlimited", None)) as two:
        with pytest.raises(FileNotFoundError):
            two.run([["sleep", "600"], ["true"]], logs, tmp_path, dict(os.environ), 60)
        assert set(psutil.Process().children()) <= set(before)


@pytest.mark.usefixtures("hosts")
def test_a_link_lets_no_more_through_than_its_rate(tmp_path: Path) -> None:
    # 2 MB over 20 Mbit/s take 0.8 s, less the burst of 131 072 bytes at once: 0.75 s.
    server = f"import socket; listening = socket.create_server(('{ADDRESSES[0]}', 5000))"
    listen = f"{server}; peer, _ = listening.accept()\nwhile peer.recv(65536): pass"
    send = (
        "import socket, time\nwhile True:\n"
        f"    try: s = socket.create_connection(('{ADDRESSES[0]}', 5000), 1); break\n"
        "    except OSError: time.sleep(0.05)\n"
        "before = time.perf_counter(); s.sendall(bytes(2_000_000)); s.shutdown(socket.SHUT_WR); s.recv(1)\n"
        f"sent = int(open('/sys/class/net/{INTERFACE}/statistics/tx_bytes').read())\n"
        "print(time.perf_counter() - before, sent)"
    )
    commands = [[sys.executable, "-c", code] for code in (listen, send)]
    logs = [tmp_path / "listen.log", tmp_path / "send.log"]
    with TwoHosts(Link("20", 20)) as two:
        two.run(commands, logs, tmp_path, dict(os.environ), 20)
    seconds, sent = map(float, logs[1].read_text().split())
    assert 0.74 < seconds < 3
    assert 2_000_000 <= sent < 2_100_000  # headers: 66 bytes in 1500, fewer where the kernel counts large packets


@pytest.mark.usefixtures("hosts")
def test_a_host_that_fails_ends_the_other_and_its_words_are_told(tmp_path: Path) -> None:
    fails = [sys.executable, "-c", "print('no room left'); raise SystemExit(3)"]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with TwoHosts(Link("unlimited", None)) as two, pytest.raises(HostFailed, match=r"(?s)exit code 3.*no room left"):
        two.run([["sleep", "600"], fails], logs, tmp_path, dict(os.environ), 60)


@pytest.mark.usefixtures("hosts")
def test_a_time_limit_ends_both_hosts_even_where_they_ignore_sigterm(tmp_path: Path) -> None:
    stubborn = ["sh", "-c", "trap '' TERM; sleep 600"]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with TwoHosts(Link("unlimited", None)) as two, pytest.raises(HostFailed, match="not done after 1 s"):
        two.run([stubborn, stubborn], logs, tmp_path, dict(os.environ), 1)


@pytest.mark.usefixtures("hosts")
def test_what_a_killed_benchmark_left_is_removed_by_the_next() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    subprocess.run(["ip", "netns", "add", f"{PREFIX}-{dead.pid}-0"], check=True)
    with TwoHosts(Link("unlimited", None)):
        assert own_namespaces(dead.pid) == []
        assert len(own_namespaces()) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_benchmark_that_is_stopped_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    env = environment(TMPDIR=str(tmp_path))
    words = ["--quick", "--only", "dense", "--links", "100 Mbit/s", "--out", str(tmp_path / "out")]
    process = subprocess.Popen([*BENCHMARK, *words], cwd=REPOSITORY, env=env, stderr=subprocess.DEVNULL)
    assert wait_until(lambda: any(tmp_path.glob("slow-link-*/run/train.log")), 60)  # the ranks are under way
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert own_namespaces(process.pid) == []
    assert not any(tmp_path.glob("slow-link-*"))
    lines = [" ".join(found.info["cmdline"] or []) for found in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tmp_path) in line]


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_a_short_run_between_hosts_sends_what_arithmetic_says(tmp_path: Path) -> None:
    words = ["--quick", "--only", "dense", "--links", "unlimited", "--out", str(tmp_path / "out")]
    env = environment(TMPDIR=str(tmp_path))
    done = subprocess.run([*BENCHMARK, *words], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads((tmp_path / "out" / "slow_link.json").read_text())["rows"]
    # A ring of two: each sends half of the gradients' 4 bytes a parameter twice. Headers and other sums: under 2 %.
    assert 1.0 < found["sent_bytes"] / (4 * 21_415_690) < 1.02
    assert (tmp_path / "out" / "slow_link.html").stat().st_size > 1_000_000  # plotly is within
    assert "dense" in done.stdout
    assert not any(tmp_path.glob("slow-link-*"))
