"""The next token of each sequence, drawn on the device.

The draw is a function of (seed, choice, position, token) alone, so it is the same in any batch; it is not the CPU
engine's, which inverts the cumulative distribution. The kernel is kernels/triton/sampling.py.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.events import Token
from contracts.sampling import SamplingParams
from engine.cuda.inputs.decode_state import DecodeState, pack
from engine.cuda.inputs.sampling_columns import DrawnRow, columns, is_greedy
from engine.cuda.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from engine.cuda.runtime.upload import upload, upload_all
from engine.sampling.host_sampler import Sampler, with_asked_logprobs
from engine.sampling.token_masks import NO_MASKS, MaskMemory, TokenMasks
from engine.sequence import Sequence
from kernels.registry import Registry
from kernels.specs import QuantSpec, SampleSpec
from kernels.workspace import sample_workspace_nbytes

_ARGMAX_NBYTES = 1 << 20


class SamplingKernel:
    """The library's greedy and random choice."""

    def __init__(
        self, registry: Registry, vocab: int, max_rows: int, device: torch.device, team: ProcessGroup = SINGLE_PROCESS
    ) -> None:
        self._group, self.device = team, device
        self._argmax = registry.get("argmax", QuantSpec(vocab, "none"))
        spec = SampleSpec(vocab)
        self._sample = registry.get("sample", spec)
        nbytes = max(_ARGMAX_NBYTES, sample_workspace_nbytes(spec, max_rows))
        self._scratch = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def alone(self, state: DecodeState, logits: Tensor, greedy: bool) -> Tensor:
        """The tokens, in the first rows of the state. `greedy`: all rows are."""
        count = len(logits)
        tokens = state.sampled[:count]
        if greedy:
            self._argmax(logits, tokens, self._scratch)
        else:
            inputs = state.draw_inputs(count)
            self._sample(
                logits, inputs.temperatures, inputs.top_ks, inputs.top_ps, inputs.min_ps, inputs.seeds,
                inputs.positions, tokens, state.logprobs[:count], self._scratch,
            )  # fmt: skip
        return tokens

    def into(self, state: DecodeState, logits: Tensor, greedy: bool) -> None:
        """The same for a team: all of it have the first one's tokens."""
        self._group.follow(self.alone(state, logits, greedy))

    def follow(self, state: DecodeState, num_rows: int) -> None:
        """The first of a team draws these from logits that only it has."""
        self._group.follow(state.sampled[:num_rows])


@dataclass(frozen=True)
class TopLogprobs:
    """Log-probabilities of some rows: of the token drawn `[n]`, the likeliest `[n, k]`, and `asked`.

    That is `[n, a]` for as many as any row asks for; a row with fewer has others behind its own.
    """

    rows: list[int]
    own: Tensor
    values: Tensor
    token_ids: Tensor
    asked: Tensor | None

    @classmethod
    def of(cls, sequences: SequenceOf[Sequence], logits: Tensor, tokens: Tensor) -> "TopLogprobs | None":
        """Return those of the rows that ask for them; their copies to the host are under way.

        None if no row does.
        """
        rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        if not rows:
            return None
        index = upload(np.array(rows), logits.device)
        logprobs = logits.index_select(0, index).log_softmax(-1)
        top = logprobs.topk(max(sequences[row].sampling.logprobs or 0 for row in rows))
        own = logprobs.gather(1, tokens.index_select(0, index)[:, None])[:, 0]
        ids = _asked_ids([sequences[row] for row in rows])
        asked = to_host(logprobs.gather(1, upload(ids, logits.device))) if ids.size else None
        return cls(rows, to_host(own), to_host(top.values), to_host(top.indices), asked)


def _asked_ids(sequences: SequenceOf[Sequence]) -> np.ndarray:
    """Return the token ids whose log-probabilities each sequence asks for, `[n, a]`, filled up with 0."""
    asked = [sequence.sampling.logprob_token_ids for sequence in sequences]
    ids = np.zeros((len(asked), max(map(len, asked))), np.int64)
    for row, some in enumerate(asked):
        ids[row, : len(some)] = some
    return ids


class DevicePendingTokens:
    """Tokens on their way to the host, one for each row that draws."""

    def __init__(self, rows: SequenceOf[DrawnRow], tokens: Tensor, likeliest: TopLogprobs | None) -> None:
        self._indices = [row.sequence.num_generated + row.place for row in rows]
        self._sampling = [row.sequence.sampling for row in rows]
        self._tokens, self._likeliest = to_host(tokens), likeliest
        self._told: list[Token] = []
        self._done = torch.cuda.Event() if tokens.is_cuda else None
        if self._done is not None:
            self._done.record()

    @property
    def is_done(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> list[Token]:
        if not self._told:
            self._told = self._wait()
        return self._told

    def _wait(self) -> list[Token]:
        if self._done is not None:
            self._done.synchronize()
        tokens = [Token(index, token) for index, token in zip(self._indices, self._tokens.tolist(), strict=True)]
        if self._likeliest is not None:
            for at, row in enumerate(self._likeliest.rows):
                tokens[row] = self._with_logprobs(tokens[row], self._likeliest, at, self._sampling[row])
        return tokens

    def put_back(self, drawn: Tensor) -> None:
        """Into the first rows, where they were drawn."""
        if self._done is not None:
            self._done.synchronize()
        drawn[: len(self._tokens)].copy_(self._tokens)

    def _with_logprobs(self, token: Token, found: TopLogprobs, at: int, sampling: SamplingParams) -> Token:
        if (wanted := sampling.logprob_token_ids) and found.asked is not None:
            return with_asked_logprobs(token, float(found.own[at]), wanted, found.asked[at, : len(wanted)].tolist())
        count = sampling.logprobs or 0
        ids, values = found.token_ids[at, :count].tolist(), found.values[at, :count].tolist()
        return Token(token.index, token.token_id, float(found.own[at]), list(zip(ids, values, strict=True)))


class DeviceSampler(Sampler):
    """The sampler of batches in which a sequence has its logits adjusted first.

    The host says how, the device does it.
    """

    def __init__(self, eos_token_ids: SequenceOf[int], drawer: SamplingKernel) -> None:
        super().__init__(eos_token_ids)
        self._kernel = drawer

    @torch.inference_mode()
    def sample(
        self,
        sequences: SequenceOf[Sequence],
        logits_BV: Tensor,
        masks: TokenMasks = NO_MASKS,
    ) -> list[Token]:
        """At once, beside what the device holds of the batch before. DeviceRunner.draw waits for nothing."""
        adjusted = self.adjusted(sequences, logits_BV, masks)
        count = len(sequences)
        state = DecodeState(count, 1, 1, logits_BV.device)
        rows = [DrawnRow(sequence) for sequence in sequences]
        state.put(pack(None, columns(rows), state.max_rows))
        tokens = self._kernel.alone(state, adjusted, is_greedy(sequences))
        return DevicePendingTokens(rows, tokens, TopLogprobs.of(sequences, logits_BV, tokens)).wait()

    def put(self, arrays: SequenceOf[np.ndarray]) -> SequenceOf[Tensor]:
        return upload_all(arrays, self._kernel.device)

    def mask_memory(self) -> MaskMemory:
        device = self._kernel.device
        return DeviceMaskMemory(device) if device.type == "cuda" else MaskMemory()


class DeviceMaskMemory(MaskMemory):
    """Page-locked memory, copied to the device while that computes the batch whose draws need the masks."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._reader = device, torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)

    def allocate(self, num_rows: int, nbytes: int) -> Tensor:
        return torch.empty((num_rows, nbytes), dtype=torch.uint8, pin_memory=True)

    def upload(self, bits: Tensor) -> Tensor:
        """Wait for the copy, which takes some 30 us, so that whoever has the masks need not."""
        with torch.cuda.stream(self._stream):
            there = bits.to(self._device, non_blocking=True)
        there.record_stream(self._reader)  # its last holder is gone before the draw has run
        self._stream.synchronize()
        return there


def to_host(tensor: Tensor) -> Tensor:
    """A copy that is complete once what was launched before is."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
