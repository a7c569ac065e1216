"""compression=fp16: gradients travel in IEEE half precision."""

from src.compression.cast import Cast


class FP16(Cast):
    """What is beyond 65504 becomes infinite, what is below 6e-8 becomes zero; 11 bits of mantissa."""

    hook_name = "fp16_compress_hook"
