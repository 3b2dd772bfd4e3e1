"""The choice of a row's experts on the CPU. Shapes: M rows, E experts, K of them for a row."""

import torch

from engine.cpu.linear import Linear
from models.config import Experts, ExpertScoring

_LEAST_SUM = 1e-20  # as in DeepSeek-V3: scores of a sigmoid may all be 0


class ExpertRouter:
    """A router that scores experts by a product.

    `choice_bias_E` is added where experts are chosen, not to what they weigh.
    """

    def __init__(self, config: Experts, scores: Linear, choice_bias_E: torch.Tensor | None = None) -> None:
        self._config, self._scores, self._choice_bias_E = config, scores, choice_bias_E

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each row's experts are weighed by and which they are, the preferred first.

        Both are `[M, K]`.
        """
        config, scores_ME = self._config, self._score(self._scores(x).float())
        preference_ME = scores_ME if self._choice_bias_E is None else scores_ME + self._choice_bias_E
        if config.num_groups > 1:
            preference_ME = self._in_best_groups(preference_ME)
        ids_MK = preference_ME.topk(config.top_k).indices
        weights_MK = scores_ME.gather(1, ids_MK)
        if config.renormalize:
            weights_MK = weights_MK / (weights_MK.sum(-1, keepdim=True) + _LEAST_SUM)
        return weights_MK * config.scale if config.scale != 1 else weights_MK, ids_MK

    def _score(self, logits_ME: torch.Tensor) -> torch.Tensor:
        if self._config.scoring is ExpertScoring.SOFTMAX:
            return logits_ME.softmax(-1)
        # Not torch.sigmoid, whose last few elements of a thread's share take another exponential than the others.
        return 1 / (1 + torch.exp(-logits_ME))

    def _in_best_groups(self, preference_ME: torch.Tensor) -> torch.Tensor:
        """Return the preferences with those outside a row's `top_groups` at minus infinity.

        A group is as good as its best expert (DeepSeek-V2), or, scored by a sigmoid, as its two best together (V3).
        """
        by_group = preference_ME.unflatten(1, (self._config.num_groups, -1))
        num_best = 1 if self._config.scoring is ExpertScoring.SOFTMAX else 2
        best = by_group.topk(num_best, -1).values.sum(-1).topk(self._config.top_groups).indices
        is_out = torch.ones(by_group.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        return by_group.masked_fill(is_out[..., None], -torch.inf).flatten(1)
