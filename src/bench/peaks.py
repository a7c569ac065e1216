"""Nominal peaks of GPUs' dense arithmetic. A device that is not in this table has none: nothing is guessed."""

import re
from typing import NamedTuple


class Peaks(NamedTuple):
    """Dense TFLOP/s at boost clock, FP32 accumulation; None: the device has no such arithmetic.

    source: NVIDIA's document. Its figures marked "with sparsity" are halved here.
    """

    fp32: float
    tf32: float | None
    fp16: float
    bf16: float | None
    source: str


#: By what torch.cuda.get_device_name() says, matched whole: a slice of a GPU (MIG) and a virtual one have other names.
PEAKS: dict[str, Peaks] = {
    r"NVIDIA H200": Peaks(66.9, 494.7, 989.4, 989.4, "H200 datasheet; Hopper whitepaper, table 2 (H100 SXM5)"),
    r"NVIDIA H100 80GB HBM3": Peaks(66.9, 494.7, 989.4, 989.4, "Hopper whitepaper v1.04, table 2 (H100 SXM5)"),
    r"NVIDIA H100 PCIe": Peaks(51.2, 378.0, 756.0, 756.0, "Hopper whitepaper v1.04, table 2 (H100 PCIe)"),
    r"NVIDIA H100 NVL": Peaks(60.0, 417.5, 835.5, 835.5, "H100 datasheet (H100 NVL)"),
    r"(NVIDIA )?A100-(SXM4|PCIE|PCIe)-(40|80)GB|NVIDIA A100 80GB PCIe": Peaks(
        19.5, 156.0, 312.0, 312.0, "A100 datasheet"
    ),
    r"NVIDIA A30": Peaks(10.3, 82.0, 165.0, 165.0, "A30 datasheet"),
    r"NVIDIA A40": Peaks(37.4, 74.8, 149.7, 149.7, "A40 datasheet"),
    r"NVIDIA A10": Peaks(31.2, 62.5, 125.0, 125.0, "A10 datasheet"),
    r"NVIDIA RTX A6000": Peaks(38.7, 77.4, 154.8, 154.8, "Ampere GA102 whitepaper, appendix A (RTX A6000)"),
    r"NVIDIA GeForce RTX 3090": Peaks(35.6, 35.6, 71.0, 71.0, "Ampere GA102 whitepaper, appendix A (RTX 3090)"),
    r"NVIDIA L4": Peaks(30.3, 60.0, 121.0, 121.0, "L4 datasheet"),
    r"NVIDIA L40S": Peaks(91.6, 183.0, 362.05, 362.05, "L40S datasheet"),
    r"NVIDIA GeForce RTX 4090": Peaks(82.6, 82.6, 165.2, 165.2, "Ada whitepaper, appendix A (RTX 4090)"),
    r"Tesla V100-SXM2-(16|32)GB": Peaks(15.7, None, 125.0, None, "V100 datasheet (SXM2)"),
    r"Tesla V100-PCIE-(16|32)GB": Peaks(14.0, None, 112.0, None, "V100 datasheet (PCIe)"),
    r"(NVIDIA |Tesla )T4": Peaks(8.1, None, 65.0, None, "T4 datasheet"),
}


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense TFLOP/s of a device for "fp32", "tf32", "fp16" or "bf16"; None where they are not known here."""
    for pattern, peaks in PEAKS.items():
        if re.fullmatch(pattern, device_name):
            peak: float | None = getattr(peaks, dtype)
            return peak
    return None
