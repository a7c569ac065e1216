"""What was not sent, kept by parameter: buckets are made anew when their order is known, parameters last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Flat:
    """One bucket's residual. values: shape (elements of the bucket,), in the order of its parameters."""

    parameters: list[Tensor]
    values: Tensor


@dataclass
class Residuals:
    """names: of the trained parameters. Each residual is zero until something is kept."""

    names: Mapping[Tensor, str]
    flats: dict[int, Flat] = field(default_factory=dict)
    views: dict[str, Tensor] = field(default_factory=dict)  # by name, in the parameter's shape, into a flat

    def of(self, index: int, buffer: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """The residual of bucket `index`, laid out as `buffer`; live.

        buffer: shape (elements,), the parameters' gradients one after the other, each in its parameter's strides.
        """
        held = self.flats.get(index)
        if held is not None and same(held.parameters, parameters):
            return held.values
        if held is not None:
            self.flats.clear()  # other buckets than before; the views hold what was in those
        values = torch.zeros_like(buffer)
        for parameter, view in zip(parameters, views_into(values, parameters), strict=True):
            name = self.names[parameter]
            if name in self.views:
                view.copy_(self.views[name])
            self.views[name] = view
        self.flats[index] = Flat(list(parameters), values)
        return values

    def replace(self, index: int, values: Tensor) -> None:
        """Make `values`, laid out as what `of` gave for bucket `index`, its residual."""
        held = self.flats[index]
        held.values = values
        for parameter, view in zip(held.parameters, views_into(values, held.parameters), strict=True):
            self.views[self.names[parameter]] = view

    def named(self) -> dict[str, Tensor]:
        """Live, by parameter, in its shape."""
        return dict(self.views)

    def put_back(self, kept: Mapping[str, Tensor]) -> None:
        """Make `kept` the residuals, of the named parameters; all others are zero again."""
        for name, view in self.views.items():
            if name in kept:
                view.copy_(kept[name])
            else:
                view.zero_()
        for name in kept.keys() - self.views.keys():
            self.views[name] = kept[name].clone()

    def squared_norm(self) -> Tensor | None:
        """The sum of squares over all parameters, scalar, fp32; None before anything was kept."""
        if not self.views:
            return None
        kept = [self.views[name] for name in sorted(self.views)]  # a resumed run has met them in another order
        return torch.stack(list(torch._foreach_norm(kept))).float().square().sum()


def same(held: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    return len(held) == len(given) and all(one is other for one, other in zip(held, given, strict=True))


def views_into(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The part of each parameter of a bucket, in the parameter's shape and strides, as DDP's reducer lays them out."""
    parts, offset = [], 0
    for parameter in parameters:
        part = flat[offset : offset + parameter.numel()]
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        parts.append(part.as_strided(parameter.shape, parameter.stride()) if is_dense else part.view(parameter.shape))
        offset += parameter.numel()
    return parts


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The first name of each trained parameter."""
    return {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
