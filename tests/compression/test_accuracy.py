"""What compression costs on real data: with error feedback, next to nothing."""

import pytest

from tests.command import summary, train

PRESET = [
    "experiment=mnist_ddp", "trainer.epochs=3", "launch.device=cpu", "launch.nproc=2", "tracking=off",
    "trainer.log_every=100",
]  # fmt: skip


def trained(folder, mnist, *words):
    """(accuracy, share of the dense bytes) after 3 epochs of all 60,000 images."""
    folder.mkdir()
    outcome = train(folder, *PRESET, f"data.root={mnist}", *words, timeout=900)
    assert outcome.code == 0, outcome.text
    done = summary(outcome.run_dir())
    assert done["samples"] == 3 * 60_000
    told = done.get("compression", {"sent_bytes": 1, "dense_bytes": 1})
    return done["eval"]["accuracy"], told["sent_bytes"] / told["dense_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_one_percent_with_error_feedback_ends_within_0_3_points_of_dense(tmp_path, mnist_archives, capsys):
    dense, _ = trained(tmp_path / "dense", mnist_archives)
    ours, share = trained(tmp_path / "topk", mnist_archives, "compression=topk", "compression.ratio=0.01")
    with capsys.disabled():
        print(f"\ndense {dense:.4f}, topk at 1 % {ours:.4f}, {share:.3f} of the bytes")
    assert ours >= dense - 0.003
    assert share == pytest.approx(0.02, rel=0.01)  # 1 % of the values, 8 bytes each instead of 4, between 2 ranks
