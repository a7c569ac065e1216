"""compression=bf16: gradients travel in bfloat16."""

from src.compression.cast import Cast


class BF16(Cast):
    """The range of fp32, 8 bits of mantissa."""

    hook_name = "bf16_compress_hook"
