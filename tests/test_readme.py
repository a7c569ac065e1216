"""Every command in the README does what it says, shortened to a few steps."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import REPOSITORY, TRAIN, environment, summary

TEXT = (REPOSITORY / "README.md").read_text()
#: The README's own example of a data set, and the page without it.
[EXAMPLE] = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
README = TEXT.replace(EXAMPLE, "")
CI = (REPOSITORY / ".ci" / "run").read_text()
#: The indented lines, without their comments.
COMMANDS = [
    re.sub(r"\s+#.*", "", line).strip().removeprefix(".venv/bin/")
    for line in re.findall(r"^ {4}(?!step memory)(.+)", README, re.M)
]
TRAINING = [line for line in COMMANDS if line.startswith(("python train.py", "torchrun"))]

#: Two steps on two CPU ranks, whatever the preset says.
SHORT = ["trainer.max_steps=2", "launch.device=cpu", "trainer.log_every=1"]
#: And less of what some tasks do for long.
SHORTER = {
    "task=collectives": ["task.sizes_mb=[0.1]", "task.iterations=5"],
    "task=matmul": ["task.size=256"],
    "task=profile": ["task.steps=2"],
}


def test_the_readme_has_no_command_that_this_file_does_not_know():
    others = [line for line in COMMANDS if line not in TRAINING]
    assert all(line.startswith("make ") for line in others), others
    targets = {line.split()[1] for line in others}
    known = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert targets <= known
    # .ci/run runs demo, lint, test and test-slow; benchmarks take too long for it, and the slow link needs root.
    assert targets - {"benchmarks", "slow-link"} <= set(
        re.findall(r"^make ([\w-]+)", (REPOSITORY / ".ci" / "run").read_text(), re.M)
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", TRAINING)
def test_the_command_trains(line: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "<folder>" in line:
        line = line.replace("<folder>", str(request.getfixturevalue("mnist_archives")))
    (tmp_path / "my.py").write_text(f"import torch\n\n{EXAMPLE}")
    words = shlex.split(line)
    if words[0] == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", *words[1 : words.index("train.py")]]
    else:
        start = [sys.executable]
    env = environment(PYTHONPATH=f"{tmp_path}:{REPOSITORY}", WANDB_MODE="offline")

    def run(*words: str) -> None:
        command = [*start, str(TRAIN), *words, *SHORT, *(more for word in words for more in SHORTER.get(word, []))]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr

    goes_on = "multirun/a" in line and "hydra.run.dir" not in line
    if goes_on:  # from what the page's first command about checkpoints leaves
        [saving] = [other for other in TRAINING if "hydra.run.dir=multirun/a" in other]
        run(*shlex.split(saving)[2:])
    run(*words[words.index("train.py") + 1 :])
    runs = [path.parent for path in tmp_path.rglob("summary.json")]
    expected = 9 if "strategy=ddp,fsdp,deepspeed" in line else 3 if "-m" in words else 1
    if goes_on and words[2].startswith("task="):
        expected = 2  # a run of its own beside the one that it reads
    assert len(runs) == expected
    for run_dir in runs:
        assert summary(run_dir)["status"] == "finished"
    shutil.rmtree(tmp_path)


def test_no_place_on_the_page_waits_to_be_filled():
    assert not re.findall(r"^[A-Z ]{4,}$|TODO|TBD", TEXT, re.M)
