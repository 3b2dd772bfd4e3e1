"""What a classifier's config.json says of scores, in sentence-transformers' words."""

from typing import Any

from checkpoint.checkpoint import ScoreForm

_SIGMOID = ("", "Sigmoid")
_OLDER = "sbert_ce_default_activation_function"


def score_form(config: dict[str, Any], num_labels: int) -> ScoreForm | None:
    """Return how scores are made; None of a model that is no classifier.

    Where nothing is said a sigmoid makes them, as in sentence-transformers and vLLM.
    """
    if not num_labels:
        return None
    if num_labels > 1:
        return ScoreForm(f"it has {num_labels} labels (id2label); a score is made of one")
    table = config.get("sentence_transformers")
    stated = table.get("activation_fn") if isinstance(table, dict) else config.get(_OLDER)
    name = str(stated or "").rpartition(".")[2]
    if name not in (*_SIGMOID, "Identity"):
        return ScoreForm(f"its scores are made by {stated}, which is not supported")
    return ScoreForm(is_sigmoid=name in _SIGMOID)
