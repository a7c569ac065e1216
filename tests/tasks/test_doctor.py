"""task=doctor as a user starts it."""

from pathlib import Path

import pytest

from tests.command import summary, train

TWO_RANKS = ["task=doctor", "launch.device=cpu", "launch.nproc=2"]

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_SecretSecretSecret",
    "HTTPS_PROXY": "http://someone:pass-of-the-proxy@proxy.invalid:3128",
    "http_proxy": "http://someone:pass-of-the-proxy@proxy.invalid:3128",
    "AWS_SECRET_ACCESS_KEY": "aws-secret-access-key",
    "NCCL_MADE_UP_AUTH": "nccl-made-up-secret",
    "WANDB_BASE_URL": "https://someone:pass-of-the-server@wandb.invalid",
}
NOWHERE = [
    *(SECRETS[name] for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NCCL_MADE_UP_AUTH")),
    *("pass-of-the-proxy", "pass-of-the-server", "someone", "proxy.invalid", "wandb.invalid"),
]


def test_a_report_of_two_ranks_goes_to_the_terminal_and_the_run_folder(tmp_path: Path) -> None:
    done = train(tmp_path, *TWO_RANKS)
    assert done.code == 0, done.text
    run_dir = done.run_dir()
    text = (run_dir / "doctor.md").read_text()
    assert text in done.stdout + "\n"
    for words in ("## Software", "## Ranks", "## Host 0", "| 1 | 2 | 1 of 2 | 0 | cpu", "gloo right", "- interfaces: "):
        assert words in text
    found = summary(run_dir)["doctor"]
    assert [rank["sums_right"] for rank in found["ranks"]] == [{"gloo": True}, {"gloo": True}]
    assert found["versions"]["hydra-core"]
    assert "deepspeed" in found["versions"]  # which a strategy needs
    assert not (run_dir / "wandb").exists()


def test_no_secret_is_in_the_report_or_the_run_folder(tmp_path: Path) -> None:
    home = tmp_path / "home-of-someone-private"
    home.mkdir()
    done = train(tmp_path, *TWO_RANKS, **SECRETS, HOME=str(home), NCCL_TOPO_FILE=str(home / "topology.xml"))
    assert done.code == 0, done.text
    assert "- WANDB_API_KEY=set (value not shown)" in done.stdout
    run_dir = done.run_dir()
    written = {path: path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file()}
    for secret in NOWHERE:
        assert secret not in done.text
        assert [path.name for path, text in written.items() if secret in text] == []
    assert "home-of-someone-private" not in (run_dir / "doctor.md").read_text()


def test_findings_do_not_change_the_exit_code(tmp_path: Path) -> None:
    done = train(tmp_path, *TWO_RANKS, OMP_NUM_THREADS="999", NCCL_SOCKET_IFNAME="nosuch0")
    assert done.code == 0, done.text
    problems = [line for line in done.stdout.splitlines() if line.startswith("- **problem**")]
    assert any("(OMP_NUM_THREADS=999)" in line for line in problems)
    assert any("NCCL_SOCKET_IFNAME=nosuch0: no network interface" in line for line in problems)


@pytest.mark.parametrize("nproc", [1, 2])
def test_an_interface_without_which_no_rank_starts_is_refused(tmp_path: Path, nproc: int) -> None:
    done = train(tmp_path, "task=doctor", "launch.device=cpu", f"launch.nproc={nproc}", GLOO_SOCKET_IFNAME="nosuch0")
    assert done.code == 2, done.text
    assert "GLOO_SOCKET_IFNAME=nosuch0 in the environment: no network interface here is called nosuch0" in done.stderr
    assert done.run_dirs() == []


def test_a_lone_rank_is_looked_at_as_well(tmp_path: Path) -> None:
    done = train(tmp_path, "task=doctor", "launch.device=cpu", "launch.nproc=1")
    assert done.code == 0, done.text
    assert "| 0 | 1 | 0 of 1 | 0 | cpu" in done.stdout
