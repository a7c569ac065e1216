"""model=hf_causal_lm: a causal language model of Hugging Face's, from the hub, a local folder or a configuration.

Its parameters keep Hugging Face's names. It is built on the meta device; rank 0 reads the weights and the others
receive them (src/weights.py), so no rank holds more than its strategy makes it.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from src.flops import DecoderFlops, decoder_flops
from src.models.hf_folder import configuration, fetched
from src.models.hf_lora import Lora
from src.models.hf_packing import known_packing

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class HFCausalLM(nn.Module):
    """name: a folder, or a name on the hub. pretrained: with its weights; else drawn by the seed.

    config: overrides of its config.json; with a "model_type" among them, all of it, and no config.json is read.
    attention: Hugging Face's `attn_implementation`. freeze: patterns of names of parameters that are not trained.
    lora: adapters that are trained instead of the weights, where its rank is no None.
    Raises Refused where the hub or the folder can't give what is asked.
    """

    inputs = "tokens"
    reads_positions = True
    keeps_units_whole = True
    keeps_buffers = True
    inner: "PreTrainedModel"

    def __init__(
        self,
        name: str | None,
        pretrained: bool = True,
        config: dict[str, Any] | None = None,
        attention: str = "sdpa",
        freeze: Sequence[str] = (),
        lora: Lora | None = None,
    ) -> None:
        super().__init__()
        if pretrained and name is None:
            raise ValueError(
                "model.name=null, but model.pretrained=true reads weights. Name a folder or a model of the hub, or use"
                " model.pretrained=false."
            )
        self.name, self.pretrained = name, pretrained
        self.attention, self.freeze, self.lora = attention, list(freeze), lora
        self.configuration = self.configured(name, config or {})
        self.seed = torch.initial_seed()  # of the draw that is put off until the weights are read
        with torch.device("meta"):
            self.adopt(self.changed(self.drawn()))

    def configured(self, name: str | None, overrides: dict[str, Any]) -> "PretrainedConfig":
        """Hugging Face's configuration of the model."""
        return configuration(name, overrides)

    def adopt(self, inner: "PreTrainedModel") -> None:
        """Take Hugging Face's module for this one, under its own names: both have the same children from here on.

        As a child it would put a word of ours before every name, in checkpoints, freezing, logs and exports.
        """
        self.__dict__["inner"] = inner
        self._modules, self._parameters, self._buffers = inner._modules, inner._parameters, inner._buffers

    def drawn(self) -> "PreTrainedModel":
        """Hugging Face's module, its weights drawn, on torch's default device."""
        from transformers import AutoModelForCausalLM  # 3 s to import

        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            self.configuration, attn_implementation=self.attention, dtype=torch.float32
        )
        return made

    def changed(self, inner: "PreTrainedModel") -> "PreTrainedModel":
        """With adapters and frozen parameters, as asked."""
        if self.lora is not None:
            self.lora.add_to(inner)
        names = [name for name, _ in inner.named_parameters()]
        for pattern in self.freeze:
            if not fnmatch.filter(names, pattern):
                raise ValueError(
                    f"model.freeze={pattern} fits no parameter of {self.called()}; they are named like {names[0]} and"
                    f" {names[-1]}. Correct the pattern."
                )
        for name, parameter in inner.named_parameters():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.freeze):
                parameter.requires_grad_(False)
        return inner

    def called(self) -> str:
        return self.name or f"a {self.configuration.model_type}"

    def prepare(self) -> None:
        """Fetch the weights, once for all ranks. Raises Refused where there are none to be had."""
        if self.pretrained:
            assert self.name is not None
            fetched(self.name)

    def folder(self) -> Path | None:
        """Where the files of `name` are on this disk; None without a name, or where only a configuration was read."""
        if self.name is None or not (Path(self.name).is_dir() or self.pretrained):
            return None
        return fetched(self.name)

    def read_weights(self) -> dict[str, Tensor]:
        """Every parameter and buffer on the CPU, by name; tied ones under their first."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed)
            inner = self.changed(self.read() if self.pretrained else self.drawn())
        return {**dict(inner.named_parameters()), **dict(inner.named_buffers())}

    def read(self) -> "PreTrainedModel":
        """Hugging Face's module with the weights of its folder, in fp32. ValueError where the folder lacks some."""
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        made, told = AutoModelForCausalLM.from_pretrained(
            self.folder(),
            config=self.configuration,
            attn_implementation=self.attention,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
        if missing := sorted(told["missing_keys"]):
            raise ValueError(
                f"the weights of model.name={self.name} lack {len(missing)} of the model's: {', '.join(missing[:3])}."
                " Name a complete model, or change model.config back."
            )
        read: PreTrainedModel = made
        return read

    def units(self) -> list[nn.Module]:
        """The decoder layers, which Hugging Face says must not be split."""
        kinds = self.inner._no_split_modules or set()
        lists = [module for module in self.modules() if isinstance(module, nn.ModuleList)]
        found = [child for module in lists for child in module if type(child).__name__ in kinds]
        if not found:  # of an architecture that says nothing: the list that is as long as there are layers
            num_layers = self.inner.config.get_text_config().num_hidden_layers
            found = next((list(module) for module in lists if len(module) == num_layers), [])
        if not found:
            raise ValueError(f"{type(self.inner).__name__} names no decoder layers, which are what is sharded as one.")
        return found

    def flops(self) -> DecoderFlops | None:
        """Of the whole model, a token: what MFU is worked out from. None where not all of it computes each token."""
        config, embedding = self.inner.config.get_text_config(), self.inner.get_input_embeddings()
        has_experts = any(
            getattr(config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts")
        )
        if has_experts or not hasattr(config, "num_attention_heads"):
            return None
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        head = self.inner.get_output_embeddings()
        is_tied = head is not None and head.weight is embedding.weight  # then the table scores as well
        return decoder_flops(
            self,
            config.num_hidden_layers,
            config.num_attention_heads * head_width,
            looked_up=[] if is_tied else [embedding],
        )

    def train(self, mode: bool = True) -> "HFCausalLM":
        super().train(mode)
        self.inner.training = mode
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, (batch, sequence, vocabulary).

        tokens: int64, (batch, sequence); or (batch, 2, sequence), where the second row says each token's position in
        its document, from 0: then documents don't see one another.
        """
        is_packed = tokens.ndim == 3
        named = {"input_ids": tokens[:, 0], "position_ids": tokens[:, 1]} if is_packed else {"input_ids": tokens}
        with known_packing(is_packed) as asked:
            logits: Tensor = self.inner(**named, use_cache=False).logits
        if is_packed and not asked:
            raise ValueError(
                f"a {self.inner.config.model_type} builds its masks without positions, so packed documents would see"
                " one another. Use data.packing=windows or none."
            )
        return logits

    def data_problems(self, data: Mapping[str, Any], packs_documents: bool) -> list[str]:
        """What of the data's arguments does not suit: one line each, of choice, reason and remedy."""
        config, found = self.inner.config.get_text_config(), []
        if packs_documents and (self.inner._is_stateful or self.attention.startswith("flash")):
            # transformers 5.24 looks for packed documents in batches of one row only, where attention is flash's.
            why = "carries a state along" if self.inner._is_stateful else f"has model.attention={self.attention}"
            found.append(
                f"data.packing={data.get('packing')} puts several documents into a sequence, and {self.called()} {why},"
                " through which they would see one another. Use data.packing=windows or none"
                f"{'' if self.inner._is_stateful else ', or model.attention=sdpa'}."
            )
        for key, limit, what in (
            ("vocab_size", "vocab_size", "tokens"),
            ("sequence_length", "max_position_embeddings", "tokens a sample"),
        ):
            size, most = data.get(key), getattr(config, limit, None)
            if size is not None and most is not None and size > most:
                found.append(
                    f"data.{key}={size} {what} are more than the {most} of {self.called()}. Use data.{key}={most} or"
                    f" less, or +model.config.{limit}={size} with model.pretrained=false."
                )
        return found

    def write_folder(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """A folder that `from_pretrained` loads. weights: whole, by this model's names, on the CPU."""
        from src.models.hf_export import write

        write(self, folder, weights)
