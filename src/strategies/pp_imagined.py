"""A pipeline where tensors are fake: its stages are told the shapes that they would learn from each other."""

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._utils import _StageMeta, extract_tensor_metas

from src.batch import MicroBatch
from src.parallel.cutting import cut
from src.parallel.pipeline import Cuttable, stage_layers
from src.strategies.base import BuildSpec
from src.strategies.pp import PipelineParallel


class ImaginedPipeline(PipelineParallel):
    """Runs every stage once, one after the other, for the shapes between them; then this rank's as it really would."""

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        self.whole: nn.Module | None = copy.deepcopy(model)
        return super().wrap(model, spec)

    def forward_backward(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> Tensor | None:
        if self.whole is not None:
            self.tell_shapes(self.whole, microbatches[0].inputs)
            self.whole = None
        return super().forward_backward(microbatches, valid_targets)

    @torch.no_grad()
    def tell_shapes(self, whole: nn.Module, inputs: Tensor) -> None:
        """What goes into each of this rank's stages, and what comes out."""
        layers = stage_layers(cast(Cuttable, whole).layer_parameters(), self.num_stages, self.split_points)
        # Private in torch 2.14: a schedule shows its stages to nobody, and a stage takes shapes (input_args,
        # output_args) only when it is made, before there is a batch.
        stages = {stage.stage_index: stage for stage in getattr(self.schedule, "_stages", [])}
        if not stages:
            stage = self.schedule._stage  # type: ignore[union-attr]
            stages = {stage.stage_index: stage}
        for number, part in enumerate(cut(whole, layers)):
            outputs = self.placed(part, number, self.spec)(inputs)
            if number in stages:
                entering = inputs.detach().requires_grad_(number > 0 and inputs.is_floating_point())
                leaving = outputs.detach().requires_grad_()
                stages[number]._user_meta = _StageMeta(
                    inputs=extract_tensor_metas((entering,)), outputs=extract_tensor_metas((leaving,))
                )
            inputs = outputs
