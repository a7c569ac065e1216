"""model=gpt_*: sizes, masks, heads and initial weights."""

import math

import pytest
import torch
import yaml
from torch import nn

from src.models.gpt import GPT, Attention
from tests.command import REPOSITORY
from tests.composing import composed, run_in

SMALL = {"vocab_size": 11, "sequence_length": 6, "layers": 2, "width": 8, "heads": 4}


def parameters_by_hand(vocab_size, sequence_length, layers, width, kv_width):
    attention = 2 * (width * width + width) + width * kv_width + (width * kv_width + kv_width)  # q, o; k; v
    mlp = 4 * width * width + 4 * width + 4 * width * width + width
    norms = 2 * 2 * width
    return 2 * vocab_size * width + sequence_length * width + layers * (attention + mlp + norms) + 2 * width


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        # 2 x 256 x 128 + 128 x 128 + 4 x (65,920 + 131,712 + 512) + 256; attention 4 x 128^2 + 3 x 128.
        ("gpt_tiny", 874_752),
        # 2 x 50257 x 768 + 1024 x 768 + 12 x (2,361,600 + 4,722,432 + 3,072) + 1,536
        ("gpt_124m", 163_027_968),
        ("gpt_r12", 248_073_216),  # twelve layers of 7,087,104 more
        ("gpt_7b", 6_864_125_952),
        ("gpt_175b", 175_220_637_696),
    ],
)
def test_the_options_have_as_many_parameters_as_counted_by_hand(option, expected):
    config, problems = composed(f"model={option}", "launch.device=cpu")
    assert not problems
    arguments = {key: value for key, value in config["model"].items() if not key.startswith("_")}
    with torch.device("meta"):
        model = GPT(**arguments)
    assert sum(p.numel() for p in model.parameters()) == expected
    sizes = {key: arguments[key] for key in ("vocab_size", "sequence_length", "layers", "width")}
    assert parameters_by_hand(**sizes, kv_width=arguments["width"]) == expected


@pytest.mark.parametrize("option", ["gpt_tiny", "gpt_124m", "gpt_r12", "gpt_7b", "gpt_175b"])
def test_a_language_model_brings_data_of_its_own_length_and_vocabulary(option):
    config, problems = composed(f"model={option}", "launch.device=cpu")
    assert not problems
    assert config["data"]["_target_"] in ("src.data.text.Text", "src.data.synthetic.SyntheticTokens")
    assert config["data"]["sequence_length"] == config["model"]["sequence_length"]
    assert config["data"]["vocab_size"] == config["model"]["vocab_size"]


def test_the_command_line_chooses_other_data_and_sizes():
    config, problems = composed("model=gpt_tiny", "data=synthetic_tokens", "data.vocab_size=100", "launch.device=cpu")
    assert not problems
    assert config["model"]["vocab_size"] == 100
    config, problems = composed(
        "model=gpt_124m", "data=text", "data.sequence_length=32", "trainer.micro_batch_size=2", "launch.device=cpu"
    )
    assert not problems
    assert (config["data"]["sequence_length"], config["trainer"]["micro_batch_size"]) == (32, 2)


def test_tying_saves_the_head():
    tied, untied = GPT(**SMALL, tie_embeddings=True), GPT(**SMALL)
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 11 * 8
    tokens = torch.randint(0, 11, (2, 6))
    with torch.no_grad():
        untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
        torch.testing.assert_close(tied(tokens), untied(tokens))


def test_logits_have_a_row_a_token_and_shorter_samples_are_fine():
    model = GPT(**SMALL)
    assert model(torch.zeros(3, 6, dtype=torch.int64)).shape == (3, 6, 11)
    assert model(torch.zeros(3, 2, dtype=torch.int64)).shape == (3, 2, 11)


def test_longer_samples_than_there_are_positions_fail_with_the_remedy():
    with pytest.raises(ValueError, match=r"7 tokens a sample are more than model\.sequence_length=6; use"):
        GPT(**SMALL)(torch.zeros(1, 7, dtype=torch.int64))


def test_a_later_token_never_changes_an_earlier_logit():
    torch.manual_seed(0)
    model, tokens = GPT(**SMALL, kv_heads=2), torch.randint(0, 11, (1, 6))
    for place in range(6):
        changed = tokens.clone()
        changed[0, place] = (tokens[0, place] + 1) % 11
        different = (model(tokens) != model(changed)).any(-1)[0]
        assert not different[:place].any()
        assert different[place:].all(), "and does change its own and the later ones"


def test_grouped_heads_equal_full_heads_whose_keys_and_values_are_repeated():
    torch.manual_seed(0)
    grouped = Attention(width=8, heads=4, kv_heads=2, dropout=0.0, residual_std=0.02)
    full = Attention(width=8, heads=4, kv_heads=4, dropout=0.0, residual_std=0.02)
    state = grouped.state_dict()
    for name in ("k.weight", "v.weight", "v.bias"):
        by_head = state[name].view(2, 2, *state[name].shape[1:])  # two heads of two features
        state[name] = by_head.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(grouped(x), full(x))


def test_attention_is_softmax_of_scaled_products_over_the_past():
    torch.manual_seed(0)
    layer = Attention(width=8, heads=2, kv_heads=2, dropout=0.0, residual_std=0.02)
    x = torch.randn(1, 5, 8)
    outputs = []
    for head in (slice(0, 4), slice(4, 8)):
        q, k, v = layer.q(x)[0, :, head], layer.k(x)[0, :, head], layer.v(x)[0, :, head]
        scores = (q @ k.T / math.sqrt(4)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        outputs.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(layer(x)[0], layer.o(torch.cat(outputs, dim=-1)))


def test_weights_start_normal_with_residual_projections_scaled_by_depth():
    torch.manual_seed(0)
    model = GPT(vocab_size=300, sequence_length=64, layers=8, width=64, heads=4)
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            expected = 0.02 / math.sqrt(2 * 8)
        elif "norm" in name:
            expected = None
        elif name.endswith("bias"):
            expected = 0.0
        else:
            expected = 0.02
        if expected is not None:
            # The deviation of n normal numbers is off by 1 / sqrt(2n): 1.1 % for the smallest, 64 x 64.
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
    # ln(300) = 5.70 is the loss of guessing.
    tokens = torch.randint(0, 300, (4, 64))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(300), abs=0.1)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"heads": 3}, r"model\.heads=3 does not divide model\.width=8; choose from 1, 2, 4, 8\."),
        ({"kv_heads": 3}, r"model\.kv_heads=3 does not divide model\.heads=4; choose from 1, 2, 4\."),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_those_that_do(sizes, words):
    with pytest.raises(ValueError, match=words):
        GPT(**{**SMALL, **sizes})


def test_dropout_is_off_in_evaluation():
    torch.manual_seed(0)
    model, tokens = GPT(**SMALL, dropout=0.5), torch.zeros(2, 6, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_the_yaml_files_say_no_more_than_the_constructor_takes():
    for path in (REPOSITORY / "conf" / "model").glob("gpt_*.yaml"):
        node = yaml.safe_load(path.read_text())["model"]
        assert set(node) - {"_target_"} == {*SMALL, "kv_heads", "dropout", "tie_embeddings"}


@pytest.mark.parametrize("tie", ["false", "true"])
def test_every_strategy_trains_the_gpt_to_the_same_weights(pool, tmp_path, tie):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_bytes(bytes(i * i % 97 for i in range(1500)))
    command = ["model=gpt_tiny", f"data.root={texts}", "data.sequence_length=16", "model.width=16", "model.layers=2"]
    command += ["model.kv_heads=2", f"model.tie_embeddings={tie}", "trainer.max_steps=4", "trainer.max_grad_norm=1"]
    # eps: with 1e-8 AdamW turns gradients that are rounding noise into full steps.
    command += ["trainer.micro_batch_size=null", "trainer.global_batch_size=12", "optimizer.eps=1e-5"]
    single = run_in(pool, 1, tmp_path / "single", "strategy=single", *command)
    for strategy in ("ddp", "fsdp", "fsdp1 strategy.min_unit_parameters=1000", "deepspeed sharding=zero3"):
        overrides = f"strategy={strategy}".split()
        result = run_in(pool, 2, tmp_path / strategy.split()[0], *overrides, *command)
        assert result.series("loss") == pytest.approx(single.series("loss"), rel=1e-5), strategy
        assert result.series("grad_norm") == pytest.approx(single.series("grad_norm"), rel=1e-5), strategy
        assert result.weights.keys() == single.weights.keys()
        for name, weight in single.weights.items():
            torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=1e-5)
