"""Bytes of real exchanges, as the ledger counts them."""

import pytest

from tests.compression.building import advance, built


def ledger_of(world, name, arguments, count, steps):
    strategy = built(world, name, arguments)
    advance(world, strategy, range(steps), count=count)
    return strategy.compression.ledger.copy(), strategy.extra_metrics(), strategy.totals()


@pytest.mark.parametrize("count", [1, 3])
def test_accumulation_exchanges_once_a_step(pool, count):
    for ledger, *_ in pool.run(2, ledger_of, "topk", {"ratio": 0.1}, count, 4):
        assert ledger.steps == 4
        # 131 gradients: 2 ranks send 2 (2 - 1) / 2 of 4 bytes each for a dense sum.
        assert ledger.step_dense == 131 * 4
        assert ledger.total_dense == 4 * 131 * 4


def test_the_ledger_counts_what_the_exchange_is_made_of(pool):
    # Buckets of 48 + 3, 16 and 64 gradients or the like; 0.1 of each: 131 x 0.1 to within one value a bucket.
    for ledger, metrics, totals in pool.run(3, ledger_of, "topk", {"ratio": 0.1, "warmup_steps": 2}, 1, 5):
        dense = 2 * 2 * 131 * 4 // 3
        assert abs(ledger.step_dense - dense) <= 4  # each bucket rounds down
        assert abs(ledger.step_sent - 2 * 13.1 * 8) <= 2 * 8 * 4
        assert ledger.total_sent == 2 * ledger.step_dense + 3 * ledger.step_sent
        assert metrics["sent_bytes"] == ledger.step_sent
        assert metrics["dense_bytes"] == ledger.step_dense
        assert metrics["residual_norm"] > 0
        assert totals == {
            "compression": {"steps": 5, "sent_bytes": ledger.total_sent, "dense_bytes": ledger.total_dense}
        }


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_sixteen_bits_are_half_the_bytes(pool, name):
    for ledger, metrics, _ in pool.run(2, ledger_of, name, {}, 1, 3):
        assert ledger.total_sent * 2 == ledger.total_dense
        assert "residual_norm" not in metrics


def test_powersgd_sends_the_products(pool):
    # Rank 1 of 16 x 4 is 20 values, of 3 x 16 19; the biases' 19 travel whole.
    for ledger, *_ in pool.run(2, ledger_of, "powersgd", {"warmup_steps": 2, "min_compression_rate": 1}, 1, 4):
        assert ledger.step_sent == (20 + 19 + 19) * 4
        assert ledger.total_sent == 2 * 131 * 4 + 2 * ledger.step_sent
