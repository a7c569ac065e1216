"""Precision is a value; each strategy translates it into its engine's own terms."""

from dataclasses import dataclass

import torch

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Precision:
    """name: one of PRECISIONS. Weights and optimizer states stay fp32 under every one of them."""

    name: str

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The 16-bit type of the arithmetic; None where it is fp32 (or TF32)."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)

    @property
    def needs_scaler(self) -> bool:
        """fp16 alone: bf16 has fp32's exponent range, so a scaler there only costs."""
        return self.name == "fp16"

    def autocast(self, device: torch.device) -> torch.autocast:
        """Autocast to the 16-bit type; disabled where there is none."""
        return torch.autocast(device.type, dtype=self.compute_dtype, enabled=self.compute_dtype is not None)


def cpu_has_native_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware; without it, bf16 runs many times slower than fp32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
