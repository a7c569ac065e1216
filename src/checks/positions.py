"""Data that give each token's position, for models that read it only."""

from typing import Any

from src.checks.keys import locate


def position_problems(config: dict[str, Any]) -> list[str]:
    """Documents packed into one sequence, for a model that would let each token see the documents before its own."""
    data, model = locate(config["data"]["_target_"]), locate(config["model"]["_target_"])
    gives = getattr(data, "gives_positions", None)
    if gives is None or not gives(config["data"]) or getattr(model, "reads_positions", False):
        return []
    return [
        f"data.packing={config['data'].get('packing')} puts several documents into a sequence, each with positions of"
        f" its own, which model {config['model']['_target_']} does not read. Use data.packing=windows or none, or"
        " model=hf_causal_lm."
    ]
