"""Tensors that share memory, which safetensors refuses: each is written whole under each of its names."""

from torch import Tensor


def unshared(tensor: Tensor, spans: dict[int, list[range]]) -> Tensor:
    """`tensor`, or a copy where it lies in the memory of an earlier one (tied weights): safetensors refuses those.

    tensor: contiguous. spans: the addresses of the earlier ones by storage; this one's are added.
    """
    span = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    earlier = spans.setdefault(tensor.untyped_storage().data_ptr(), [])
    if any(span.start < other.stop and other.start < span.stop for other in earlier):
        return tensor.clone()
    earlier.append(span)
    return tensor
