"""The end of an answer: a token that stops it, or its length."""

from contracts.events import FinishReason
from engine.sampling.host_sampler import Sampler
from engine.sequence import Sequence


class StopCheck:
    """The reasons for which an answer ends after its newest token. Stop strings are the gateway's."""

    def __init__(self, sampler: Sampler, max_model_len: int) -> None:
        self._sampler, self._max_model_len = sampler, max_model_len

    def reason(self, sequence: Sequence) -> FinishReason | None:
        if self._sampler.stops(sequence.sampling, sequence.tokens[-1]):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.is_full(sequence) else None

    def is_full(self, sequence: Sequence) -> bool:
        """Return whether the answer has as many tokens as it may have, whichever they are."""
        return sequence.num_generated >= sequence.sampling.max_tokens or len(sequence.tokens) >= self._max_model_len
