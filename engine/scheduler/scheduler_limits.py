"""What a step of one engine may hold at most."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """`max_num_seqs`: of one step; what runs beyond that, since it was kept local, waits for its turn.

    `max_batched_tokens`: budget of one step, a block at least. Decodes always run; prompts have what is left, and wait
    for an answer's end where nothing is. Beside answers it is `max_mixed_tokens`, a block at least, since prompts
    lengthen their gaps; theirs are among these, but a quarter is the prompts' whatever the number of answers.
    `itl_objective_s`, unless 0.0, makes that the most: see MixedBudget, as for `graph_rows`. `max_draft_rows`: of one
    step.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_mixed_tokens: int
    graph_rows: tuple[int, ...] = ()
    itl_objective_s: float = 0.0
    max_draft_rows: int = sys.maxsize
