"""The handoff, as an engine sees it: pages reserved for KV that arrives, answers adopted or kept."""

import logging
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from contracts.errors import Corrupt, OutOfBlocks, RequestError
from contracts.events import Token
from contracts.ids import BlockId, RequestId
from engine.backend import Runner
from engine.cache.block_pool import BlockPool
from engine.cache.prefix_insertion import PrefixInserter
from engine.fair_turns import Turn, Urgency
from engine.intake import Intake
from engine.messages import EngineRequest, Reservation
from engine.request_release import RequestRelease
from engine.sampling.grammar_masks import Grammars
from engine.scheduler.batch import ScheduledChunk
from engine.scheduler.scheduler import PendingReservation, Scheduler
from engine.sequence import Sequence, Status
from engine.sequence_table import IncomingWriter, SequenceTable
from engine.stop_check import StopCheck

_log = logging.getLogger(__name__)


class Handoff:
    """Both sides of a handoff; see engine.engine. `has_work`: whether a step would compute something."""

    def __init__(
        self,
        table: SequenceTable,
        scheduler: Scheduler,
        pool: BlockPool,
        prefix_cache: PrefixInserter,
        intake: Intake,
        grammars: Grammars,
        requests: RequestRelease,
        stop_check: StopCheck,
        runner: Runner,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        has_work: Callable[[], bool],
    ) -> None:
        self._table, self._scheduler, self._pool, self._intake = table, scheduler, pool, intake
        self._prefix_cache = prefix_cache
        self._grammars, self._requests, self._stop_check, self._runner = grammars, requests, stop_check, runner
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._max_num_seqs, self._has_work = max_num_seqs, has_work
        self._refused: tuple[RequestId, int, int] | None = None
        self._why_refused = ""

    def reserve(self, request: EngineRequest, turn: Turn | None = None, num_tokens: int | None = None) -> Reservation:
        """See Engine.reserve."""
        num_known = len(request.token_ids)
        if num_tokens is not None and not num_known <= num_tokens < self._max_model_len:
            raise RequestError(
                f"pages for {num_tokens} tokens of an answer that moves are wanted, of which {num_known} are known: "
                f"there must be room for these, and less than {self._max_model_len} have KV"
            )
        num_incoming = num_known if num_tokens is None else num_tokens
        if turn is None:
            turn = self._scheduler.turns.give(request.priority, request.tenant, request.cost)
        urgency = request.priority, turn
        try:
            sequence = self._with_pages(request, urgency, num_known, num_incoming)
        except OutOfBlocks as error:
            _log.debug("request %s finds no room for its KV yet: %s", request.request_id, error)
            num_blocks = self._num_blocks(num_incoming + 1)
            self._scheduler.claim = PendingReservation(request.request_id, urgency, num_blocks)
            raise
        self._scheduler.claim = None
        blocks = [BlockId(block) for block in sequence.blocks[: self._num_blocks(num_incoming)]]
        incoming = blocks[sequence.num_inserted_blocks :]
        self._pool.retain(incoming)
        assert sequence.lease is not None
        sequence.lease.num_owners += 1
        sequence.status, sequence.turn = Status.RESERVED, turn
        sequence.cost = 0.0  # its turn is served: nothing of that comes back
        self._scheduler.turns.begin(*urgency)
        if num_tokens is not None:  # the tokens of the answer were decoded
            sequence.num_prefilled = sequence.answer_start
        self._table.add(sequence)
        self._grammars.open(sequence)
        self._table.incoming_writers[request.request_id] = IncomingWriter(sequence, incoming, sequence.lease)
        _log.debug(
            "request %s has %d KV blocks reserved, %d of its %d prompt tokens are cached",
            request.request_id, len(blocks), sequence.num_computed, sequence.num_prompt,
        )  # fmt: skip
        generations = [self._pool.generations[block] for block in blocks]
        return Reservation(request.request_id, blocks, generations, sequence.num_computed)

    def prepare(self, request_id: RequestId) -> None:
        """See Engine.prepare."""
        sequence = self._table[request_id]
        if not self._has_work() and self._table.count(Status.RESERVED) == 1:
            sequence.tokens.append(0)
            try:
                self._runner.prepare(ScheduledChunk(sequence, sequence.num_prompt, 1))
            except RuntimeError:  # the step itself may fail as well, for this request alone
                _log.exception("the first step of request %s can't be prepared", request_id)
            finally:
                sequence.tokens.pop()

    def adopt(self, request_id: RequestId, first: Token, drawn: SequenceOf[Token] = ()) -> None:
        """See Engine.adopt."""
        sequence = self._table[request_id]
        if sequence.status is not Status.RESERVED or sequence in self._intake.compiling:
            raise KeyError(f"{request_id} is {sequence.status}, not reserved")
        for index, token in enumerate((*drawn, first), sequence.num_generated):
            if token.index != index:
                raise Corrupt(f"token {token.index} came with the handoff where token {index} was expected")
            if not 0 <= token.token_id < self._vocab_size:
                raise RequestError(
                    f"token {index} that came with the handoff is {token.token_id}, outside of 0 to "
                    f"{self._vocab_size - 1}"
                )
        num_tokens = sequence.num_prompt + len(drawn) + 1
        num_blocks = self._num_blocks(num_tokens)
        if num_blocks > len(sequence.blocks):
            raise Corrupt(f"{num_tokens} tokens came, {len(sequence.blocks)} KV blocks were reserved for them")
        _log.debug("request %s goes on here after token %d, its KV is complete", request_id, first.index)
        sequence.tokens.extend(token.token_id for token in (*drawn, first))
        sequence.num_computed = num_tokens - 1  # its first step enters them into the prefix cache
        self._part_from_writer(sequence, num_blocks)
        self._give_back_beyond(sequence, num_blocks)
        self._intake.once_compiled(sequence, self._scheduler.resume)

    def incoming_writer_ended(self, request_id: RequestId, num_checked: int) -> int:
        """See Engine.incoming_writer_ended."""
        writer = self._table.incoming_writers.pop(request_id, None)
        if writer is None:
            return 0
        num_saved = self._save(writer.sequence, num_checked) if num_checked else 0
        self._pool.groups.end(writer.lease)
        self._pool.release(writer.blocks)
        return num_saved

    def _save(self, sequence: Sequence, num_checked: int) -> int:
        """Enter the KV of a handoff that is over into the prefix cache; return of how many tokens.

        Not before its writer has ended: from then on others may read these pages.
        """
        assert not self._table.is_present(sequence), f"request {sequence.request_id} still has its blocks"
        num_before = sequence.num_inserted_blocks
        sequence.num_computed = num_checked
        self._prefix_cache.insert_all(sequence)
        return (sequence.num_inserted_blocks - num_before) * self._pool.block_size

    def incoming_lost(self, request_id: RequestId, first_token: int, loss: str) -> None:
        """See Engine.incoming_lost."""
        if writer := self._table.incoming_writers.get(request_id):
            writer.sequence.lose(first_token, loss)

    def keep_local(self, request_id: RequestId) -> None:
        """See Engine.keep_local."""
        sequence = self._table.get(request_id)
        if sequence is None or not sequence.handoff:
            return
        _log.debug("request %s is not handed over: it goes on here, after %d tokens", request_id, len(sequence.tokens))
        sequence.handoff = False
        if sequence.status is Status.HELD:
            if self._stop_check.reason(sequence) is not None:
                self._requests.release(request_id)
            else:
                self._scheduler.resume(sequence)

    def _part_from_writer(self, sequence: Sequence, num_blocks: int) -> None:
        """Let the sequence alone hold the pages that it goes on with, and its writer those behind them."""
        groups, lease = self._pool.groups, sequence.lease
        if lease is None:
            return
        groups.settle(lease, sequence.num_computed)
        if writer := self._table.incoming_writers.get(sequence.request_id):
            other = groups.split(lease, num_blocks)
            self._table.incoming_writers[sequence.request_id] = replace(writer, lease=other)
        groups.narrow(lease, max(len(sequence.tokens), sequence.answer_start + sequence.sampling.max_tokens))

    def _give_back_beyond(self, sequence: Sequence, num_blocks: int) -> None:
        """Keep so many blocks. A writer's hold on the others stays."""
        unused = sequence.blocks[num_blocks:]
        if unused:
            # Another array: a runner knows by the array whose table a device has.
            sequence.blocks = array("i", sequence.blocks[:num_blocks])
            self._pool.release(unused)

    def _with_pages(self, request: EngineRequest, urgency: Urgency, num_known: int, num_incoming: int) -> Sequence:
        """Return a sequence that has its pages, for `num_known` to `num_incoming` tokens. Raises OutOfBlocks."""
        num_spare = self._room_left(urgency)
        tried = request.request_id, self._pool.num_gains, num_spare
        if tried == self._refused:  # a caller tries again and again, beside the steps of others
            raise OutOfBlocks(self._why_refused)
        sequence = self._intake.sequence_of(request)
        sequence.num_scored = sequence.num_prompt  # by whoever computes it
        # The KV of the token that comes with the handoff is the first that is computed here.
        if not self._scheduler.take_blocks(sequence, num_incoming + 1, num_spare, num_known):
            self._refused = tried
            wanted, pool = self._num_blocks(num_incoming + 1), self._pool
            left = f", {num_spare} of them left to who waits before" if num_spare else ""
            self._why_refused = f"{wanted} KV blocks wanted, {pool.num_available} of {pool.num_blocks} available{left}"
            raise OutOfBlocks(self._why_refused)
        return sequence

    def _room_left(self, urgency: Urgency) -> int:
        """Return the blocks that are left to those that come before. Raises OutOfBlocks if there is no place."""
        num_reserved = self._table.count(Status.RESERVED)
        num_places, num_spare = self._scheduler.room_before(urgency, num_reserved)
        if self._scheduler.num_active + num_reserved + num_places >= self._max_num_seqs:
            raise OutOfBlocks(f"all {self._max_num_seqs} sequence slots are taken, by who runs or waits before")
        if self._scheduler.has_preempted_before(urgency):
            # Else a busy pair hands in prompts faster than it finds room to go on.
            raise OutOfBlocks("preempted requests come first")
        return num_spare

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)
