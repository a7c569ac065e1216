"""Values of one group that another's must suit, told from the configuration alone."""

from typing import Any

from src.checks.keys import takes
from src.checks.ranges import at


def decay_problems(config: dict[str, Any]) -> list[str]:
    """Parameters spared from a decay that the optimizer does not have."""
    target = config["optimizer"]["_target_"]
    if config["trainer"]["decay_norms_and_biases"] or takes(target, "weight_decay"):
        return []
    return [
        f"trainer.decay_norms_and_biases=false spares them from weight_decay, which optimizer {target} does not take."
        " Use trainer.decay_norms_and_biases=true, or optimizer=adamw, adam or sgd."
    ]


def pairing_problems(config: dict[str, Any]) -> list[str]:
    """Data of a size that the model does not reach."""
    found = []
    for key, what in (("vocab_size", "tokens"), ("sequence_length", "tokens a sample")):
        reach, size = at(config, f"model.{key}"), at(config, f"data.{key}")
        if reach is not None and size is not None and size > reach:
            found.append(
                f"data.{key}={size} {what} are more than model.{key}={reach}."
                f" Use model.{key}={size} or more, or data.{key}={reach} or less."
            )
    return found
