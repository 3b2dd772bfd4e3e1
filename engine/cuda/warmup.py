"""A batch of each class before the first request.

So none of a request's compiles a kernel, or loads one.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from contracts.ids import BlockId, RequestId
from contracts.layout import KVLayout
from contracts.sampling import SamplingParams
from engine.cuda.model.attention import MANY_KEYS, MAX_FEW
from engine.cuda.runner import DeviceRunner
from engine.sampling.token_masks import NO_MASKS
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence

_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
_RANDOM = SamplingParams(max_tokens=1, seed=0, temperature=1.0, logprobs=1)
_ADJUSTED = SamplingParams(
    max_tokens=1, seed=0, logit_bias={0: 1.0}, frequency_penalty=1.0, repetition_penalty=1.5, bad_words=((1,),),
    allowed_token_ids=(0, 1),
)  # fmt: skip
_MAX_SCORED = 512
"""More rows than this go from the last layer to their logits by the kernels of as many."""


class WarmUp:
    """`max_rows` of a batch; `max_len` of a sequence, in tokens.

    `num_blocks` of the cache are there to be written, again and again by a sequence of more.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, max_rows: int, max_num_seqs: int, max_len: int) -> None:
        self._layout = layout
        self._max_rows, self._max_num_seqs = min(max_rows, max_num_seqs * max_len), max_num_seqs
        self._max_len, self._num_blocks = max_len, num_blocks

    def run(self, runner: DeviceRunner) -> None:
        """One row behind a long prompt, whose keys are shared out among CTAs if any batch's are, and more.

        Rows in a few long prompts; an answer beside a prompt; rows that are scored; then as many prompts as rows, which
        are drawn in every way there is, of adjusted logits too.
        """
        self._last_rows(runner, self._max_len, 1)
        for count in row_counts(min(self._max_rows, MAX_FEW, self._max_len)):
            self._last_rows(runner, min(self._max_len, MANY_KEYS), count)
        for count in row_counts(self._max_rows):
            runner.forward_without_sampling(self._prompts(_lengths(count, self._max_len), _GREEDY))
        answering = self._sequence(0, 1, _GREEDY)
        answering.tokens.append(0)
        runner.forward([ScheduledChunk(answering, 1, 1), ScheduledChunk(self._sequence(1, 2, _GREEDY), 0, 1)])
        for count in row_counts(min(self._max_rows, _MAX_SCORED)):
            runner.forward_whole(self._prompts(_lengths(count, self._max_len), _GREEDY))
        for count in row_counts(self._max_num_seqs):
            for params in (_GREEDY, _RANDOM):
                pieces = self._prompts([1] * count, params)
                runner.forward(pieces)
                self._sample(runner, pieces)
        self._sample(runner, self._prompts([1] * self._max_num_seqs, _ADJUSTED))

    def _last_rows(self, runner: DeviceRunner, length: int, count: int) -> None:
        """The last rows of a prompt."""
        runner.forward_without_sampling([ScheduledChunk(self._sequence(0, length, _GREEDY), length - count, count)])

    def _sample(self, runner: DeviceRunner, pieces: SequenceOf[ScheduledChunk]) -> None:
        runner.sample([piece.sequence for piece in pieces], runner.forward_without_sampling(pieces).logits, NO_MASKS)

    def _prompts(self, lengths: Iterable[int], params: SamplingParams) -> SequenceOf[ScheduledChunk]:
        return [
            ScheduledChunk(self._sequence(number, length, params), 0, length) for number, length in enumerate(lengths)
        ]

    def _sequence(self, number: int, length: int, params: SamplingParams) -> Sequence:
        """In blocks that others write at the same time: nobody reads what comes of it."""
        sequence = Sequence(RequestId(f"warm-up-{number}"), [0] * length, params)
        needed = self._layout.num_blocks(length)
        sequence.blocks.extend(BlockId(index % self._num_blocks) for index in range(needed))
        return sequence


def row_counts(largest: int) -> list[int]:
    """One count of each class, the largest first.

    How rows are computed changes at powers of two and nowhere else: of some the power itself belongs to what is below,
    of some to what is above. One of two neighbours is not by fours.
    """
    powers = [1 << bit for bit in range(largest.bit_length())]
    counts = {count for power in powers for count in (power - 1, power)} | {largest - 1, largest}
    return sorted((count for count in counts if 0 < count <= largest), reverse=True)


def _lengths(count: int, longest: int) -> Iterator[int]:
    for start in range(0, count, longest):
        yield min(longest, count - start)
