"""Data that give each token's position, for models that read it only."""

from typing import Any

from src.checks.keys import locate


def position_problems(config: dict[str, Any]) -> list[str]:
    """Documents packed into one sequence, for a model that would let each token see the documents before its own."""
    if not gives_positions(config["data"]) or getattr(locate(config["model"]["_target_"]), "reads_positions", False):
        return []
    return [
        f"data.packing={config['data'].get('packing')} puts several documents into a sequence, each with positions of"
        f" its own, which model {config['model']['_target_']} does not read. Use data.packing=windows or none, or"
        " model=hf_causal_lm."
    ]


def gives_positions(node: dict[str, Any]) -> bool:
    """Whether the data of a node give each token's position in its document, of several in a sequence."""
    gives = getattr(locate(node["_target_"]), "gives_positions", None)
    return gives is not None and bool(gives(node))
