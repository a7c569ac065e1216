"""model=hf_causal_lm in one process: names, values, masks of packed documents, freezing, adapters, export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from src.models.hf_causal_lm import HFCausalLM
from src.models.hf_lora import Lora
from src.weights import filled
from src.world import World
from tests.models.hf import GPT2, LLAMA, MISTRAL, loaded, saved, tokens

ALONE = World()


def made(*arguments: Any, seed: int = 0, **named: Any) -> HFCausalLM:
    """With its values, in evaluation mode."""
    torch.manual_seed(seed)
    model = HFCausalLM(*arguments, **named)
    filled(model, ALONE)
    return model.eval()


def drawn(configuration: dict[str, Any], **named: Any) -> HFCausalLM:
    return made(None, pretrained=False, config=configuration, **named)


def packed(row: Tensor, lengths: list[int]) -> Tensor:
    """(1, 2, sequence): tokens, and their places in documents of `lengths`."""
    places = torch.cat([torch.arange(length) for length in lengths])
    return torch.stack([row, places])[None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("configuration", [LLAMA, MISTRAL, GPT2], ids=lambda c: c["model_type"])
def test_a_packed_document_has_the_logits_it_has_alone(configuration: dict[str, Any], attention: str) -> None:
    model = drawn(configuration, attention=attention)
    lengths, row = [7, 1, 8], tokens(1)[0]
    with torch.no_grad():
        together = model(packed(row, lengths))[0]
        start = 0
        for length in lengths:
            alone = model(row[None, start : start + length])[0]
            # Other kernels for another mask: rounding only.
            torch.testing.assert_close(together[start : start + length], alone, rtol=0, atol=1e-5)
            start += length


def test_another_document_before_changes_no_logit() -> None:
    model = drawn(LLAMA)
    row = tokens(1)[0]
    other = torch.cat([(row[:7] + 1) % 256, row[7:]])
    with torch.no_grad():
        logits, others = model(packed(row, [7, 9])), model(packed(other, [7, 9]))
    assert torch.equal(logits[0, 7:], others[0, 7:])
    assert not torch.equal(logits[0, :7], others[0, :7])


def test_nothing_asks_a_packed_batch_for_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it would wait for the device at every forward."""
    model = drawn(LLAMA)

    def refuse(tensor: Tensor) -> bool:
        raise AssertionError("a tensor's value was read")

    monkeypatch.setattr(Tensor, "__bool__", refuse)
    monkeypatch.setattr(Tensor, "item", refuse)
    with torch.no_grad():
        model(packed(tokens(1)[0], [7, 9]))
        model(tokens(1))


def test_names_and_values_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama")
    model, theirs = made(str(folder)), loaded(folder)
    ours = model.state_dict()
    assert ours.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours[name], tensor), name
    with torch.no_grad():
        assert torch.equal(model(tokens()), theirs(tokens()).logits)


def test_weights_are_drawn_by_the_seed_alone() -> None:
    first, again, other = (drawn(LLAMA, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_nothing_is_held_before_it_is_filled(tmp_path: Path) -> None:
    model = HFCausalLM(str(saved(tmp_path / "llama")))
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    model = made(str(saved(tmp_path / "llama", tie_word_embeddings=True)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    model(tokens()).sum().backward()
    assert model.model.embed_tokens.weight.grad is not None


@pytest.mark.parametrize("configuration", [LLAMA, GPT2], ids=lambda c: c["model_type"])
def test_units_are_the_decoder_layers(configuration: dict[str, Any]) -> None:
    model = drawn(configuration)
    layers: Any = model.model.layers if configuration is LLAMA else model.transformer.h
    assert model.units() == list(layers)


def test_training_mode_reaches_every_part() -> None:
    model = drawn(LLAMA)
    assert not model.inner.training
    model.train()
    assert model.inner.training
    assert all(module.training for module in model.modules())


def test_frozen_parameters_get_no_gradient() -> None:
    model = drawn(LLAMA, freeze=["model.embed_tokens.*", "model.layers.0.*"])
    model(tokens()).sum().backward()
    for name, parameter in model.named_parameters():
        is_frozen = name.startswith(("model.embed_tokens", "model.layers.0."))
        assert (parameter.grad is None) == is_frozen, name


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.freeze=model.embeding.\* fits no parameter of a llama"):
        HFCausalLM(None, pretrained=False, config=LLAMA, freeze=["model.embeding.*"])


def test_only_adapters_are_trained_and_change_nothing_at_first(tmp_path: Path) -> None:
    folder = str(saved(tmp_path / "llama"))
    plain, adapted = made(folder), made(folder, lora=Lora(rank=4))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    # Query and value of each of two layers, two factors each: what the LoRA paper adapts.
    assert len(trained) == 8
    assert all(".lora_" in name for name in trained)
    with torch.no_grad():
        assert torch.equal(plain(tokens()), adapted(tokens()))  # the second factor begins as zeros


def test_overrides_change_the_configuration(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama")
    model = made(str(folder), pretrained=False, config={"num_hidden_layers": 3})
    assert len(model.units()) == 3
    with pytest.raises(ValueError, match=r"num_hiden_layers is nothing .* Did you mean model.config.num_hidden_layers"):
        HFCausalLM(str(folder), config={"num_hiden_layers": 3})


def test_weights_that_lack_a_layer_fail_by_name(tmp_path: Path) -> None:
    model = HFCausalLM(str(saved(tmp_path / "llama")), config={"num_hidden_layers": 3})
    with pytest.raises(ValueError, match=r"lack 9 of the model's: model.layers.2.input_layernorm.weight"):
        model.read_weights()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("rank", [None, 4], ids=["whole", "adapters"])
def test_an_export_loads_with_the_same_logits(tmp_path: Path, rank: int | None, is_tied: bool) -> None:
    model = made(str(saved(tmp_path / "llama", tie_word_embeddings=is_tied)), lora=Lora(rank=rank))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        before = model(tokens())
    model.write_folder(tmp_path / "out", {name: tensor.detach() for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        after = loaded(tmp_path / "out")(tokens()).logits
    # Merged, an adapter's part is added to the weights before, not after, the product with the input.
    torch.testing.assert_close(after, before, rtol=0, atol=0 if rank is None else 1e-5)


def test_an_export_generates_as_the_source_does(tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "llama"), tmp_path / "out"
    model = made(str(folder))
    said = {"eos_token_id": [1, 7], "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(said))
    model.write_folder(out, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    generation = loaded(out).generation_config
    assert {key: getattr(generation, key) for key in said} == said


def test_layers_can_be_recomputed_with_the_same_gradients() -> None:
    from src.parallel.recompute import recompute_activations

    gradients = []
    for mode in ("none", "full"):
        model: nn.Module = recompute_activations(drawn(LLAMA), mode)
        model.train()
        model(tokens()).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_flops_count_what_a_token_multiplies_with() -> None:
    # A layer, of four heads of 8: q and o 32 x 32, k and v 32 x 16 (two heads), three 32 x 64; two norms of 32. Then a
    # norm, and the head.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    counted = 2 * layer + 32 + 256 * 32
    small = {**LLAMA, "head_dim": 8}
    for tied in (False, True):  # a table that only looks up costs nothing; one that scores as well is the head
        flops = drawn({**small, "tie_word_embeddings": tied}).flops()
        assert flops.a_token(16) == 6 * counted + 12 * 2 * 32 * 16
    lora = drawn(small, lora=Lora(rank=2)).flops()
    assert lora.frozen == counted
    assert 0 < lora.trained < counted / 10


def test_experts_that_most_tokens_pass_by_count_no_flops() -> None:
    mixture = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
    with torch.device("meta"):
        assert HFCausalLM(None, pretrained=False, config=mixture).flops() is None


@pytest.mark.parametrize("rows", [2, 3])
def test_each_row_of_a_packed_batch_has_documents_of_its_own(rows: int) -> None:
    model, batch = drawn(LLAMA), tokens(rows)
    lengths = [[7, 9], [3, 3, 10], [16]][:rows]
    together = torch.cat([packed(row, of) for row, of in zip(batch, lengths, strict=True)])
    with torch.no_grad():
        logits = model(together)
        for row in range(rows):
            start = 0
            for length in lengths[row]:
                alone = model(batch[row : row + 1, start : start + length])[0]
                torch.testing.assert_close(logits[row, start : start + length], alone, rtol=0, atol=1e-5)
                start += length


def test_an_architecture_that_looks_at_no_positions_takes_no_packed_documents() -> None:
    opt = {"model_type": "opt", "vocab_size": 256, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    model = drawn({**opt, "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 32})
    with torch.no_grad(), pytest.raises(ValueError, match="a opt builds its masks without positions"):
        model(packed(tokens(1)[0], [7, 9]))
    with torch.no_grad():
        model(tokens(1))


def test_data_that_do_not_suit_are_refused_in_words() -> None:
    with torch.device("meta"):
        flash = HFCausalLM(None, pretrained=False, config=LLAMA)
        flash.attention = "flash_attention_2"  # without the package, that transformers asks for
        stateful = HFCausalLM(None, pretrained=False, config={"model_type": "recurrent_gemma", "num_hidden_layers": 3})
    fits = {"vocab_size": 256, "sequence_length": 128, "packing": "documents"}
    assert flash.data_problems(fits, packs_documents=False) == []
    [line] = flash.data_problems(fits, packs_documents=True)
    assert line.endswith("Use data.packing=windows or none, or model.attention=sdpa.")
    [line] = stateful.data_problems(fits, packs_documents=True)
    assert "carries a state along" in line
    too_much = flash.data_problems({"vocab_size": 257, "sequence_length": 129}, packs_documents=False)
    assert [line.split(" ")[0] for line in too_much] == ["data.vocab_size=257", "data.sequence_length=129"]


def test_layers_are_found_where_the_architecture_does_not_name_them() -> None:
    model = drawn(LLAMA)
    named = model.units()
    model.inner._no_split_modules = None
    assert model.units() == named
