"""The states of a request and the legal moves between them, as data.

The scripts in Redis, the memory twin and docs/request-states.md are made from this table.
"""

from collections.abc import Iterable
from enum import StrEnum


class RequestState(StrEnum):
    PLACED = "PLACED"
    QUEUED = "QUEUED"
    RESERVING = "RESERVING"
    HELD = "HELD"
    TRANSFERRING = "TRANSFERRING"
    LOCAL_DECODE = "LOCAL_DECODE"
    COMMITTED = "COMMITTED"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class TransitionCheck(StrEnum):
    """What becomes of a reported move. LATE: true when it was told, overtaken since by what others told."""

    LEGAL = "legal"
    LATE = "late"
    ILLEGAL = "illegal"


MEANING = {
    RequestState.PLACED: "a route and its credits are taken",
    RequestState.QUEUED: "the prefill worker has the job",
    RequestState.RESERVING: "prefill computes; decode is asked for pages",
    RequestState.HELD: "decode has no pages yet; prefill keeps its own",
    RequestState.TRANSFERRING: "decode granted pages; chunks are on their way",
    RequestState.LOCAL_DECODE: "the worker that computed the prompt decodes",
    RequestState.COMMITTED: "decode has every chunk and decodes",
    RequestState.FINISHED: "the answer is complete",
    RequestState.FAILED: "the answer will not come",
    RequestState.CANCELLED: "nobody wants the answer any more",
}

STEPS: dict[RequestState, tuple[RequestState, ...]] = {
    RequestState.PLACED: (RequestState.QUEUED,),
    RequestState.QUEUED: (RequestState.RESERVING,),
    RequestState.RESERVING: (RequestState.HELD, RequestState.TRANSFERRING, RequestState.LOCAL_DECODE),
    RequestState.HELD: (RequestState.TRANSFERRING, RequestState.LOCAL_DECODE),
    RequestState.TRANSFERRING: (RequestState.COMMITTED,),
    RequestState.LOCAL_DECODE: (),
    RequestState.COMMITTED: (),
}
"""What follows what within one attempt. Besides, any live request can end and be placed again, which begins the next
attempt: MOVES.
"""

_CLOSINGS = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)
ENDS = frozenset(_CLOSINGS)
LIVE = tuple(state for state in RequestState if state not in ENDS)

HOLDS_PREFILL = frozenset(
    {RequestState.PLACED, RequestState.QUEUED, RequestState.RESERVING, RequestState.HELD, RequestState.TRANSFERRING}
)
"""While in these, the prompt counts as work of the prefill worker.

HELD too: pages that decode can't take press back.
"""

HOLDS_DECODE = HOLDS_PREFILL | {RequestState.LOCAL_DECODE, RequestState.COMMITTED}


def _reachable(state: RequestState) -> frozenset[RequestState]:
    """Within the same attempt: not through PLACED, but that itself is a next step."""
    found: set[RequestState] = set()
    todo = [state]
    while todo:
        for following in MOVES.get(todo.pop(), ()):
            if following not in found:
                found.add(following)
                if following is not RequestState.PLACED:
                    todo.append(following)
    return frozenset(found)


MOVES: dict[RequestState, tuple[RequestState, ...]] = {
    state: (*STEPS[state], RequestState.PLACED, *_CLOSINGS) for state in LIVE
}

REACHABLE: dict[RequestState, frozenset[RequestState]] = {state: _reachable(state) for state in LIVE}
"""What may be reported in each state. Two workers report in batches, each on its own, and may lose some while Redis is
away: a report may skip states, never go back."""


def check_transition(state: RequestState, to: RequestState) -> TransitionCheck:
    """Whether a request in `state` may enter `to`; the epoch is the caller's to check."""
    if to in REACHABLE.get(state, frozenset()):
        return TransitionCheck.LEGAL
    if to == state or state in REACHABLE.get(to, frozenset()):
        return TransitionCheck.LATE
    return TransitionCheck.ILLEGAL


def require_end(state: RequestState) -> None:
    """Raises ValueError."""
    if state not in ENDS:
        raise ValueError(f"a request can't end as {state}; it ends as one of {', '.join(sorted(ENDS))}")


def moves_to_lua() -> str:
    """Return the table of moves as a Lua local: VERDICT[state][to]."""
    rows = (
        f"{state}={{{','.join(f'{to}={check_transition(state, to).value!r}' for to in RequestState)}}}"
        for state in RequestState
    )
    return f"local VERDICT = {{{','.join(rows)}}}"


def sets_to_lua() -> str:
    """Return the sets of states as Lua locals: HOLDS_PREFILL, HOLDS_DECODE, ENDS."""
    sets = {"HOLDS_PREFILL": HOLDS_PREFILL, "HOLDS_DECODE": HOLDS_DECODE, "ENDS": ENDS}
    return "\n".join(f"local {name} = {{{_flags(states)}}}" for name, states in sets.items())


def to_markdown() -> str:
    """The table for docs/request-states.md."""
    rows = [
        f"| {state} | {MEANING[state]} | {_mark(state, HOLDS_PREFILL)} | {_mark(state, HOLDS_DECODE)} "
        f"| {', '.join(MOVES.get(state, ())) or 'nothing: the end'} |"
        for state in RequestState
    ]
    return "\n".join([
        "# States of a request",
        "",
        "Made from `coordinator/request_states.py` by its `to_markdown()`; a test compares them.",
        "",
        "Moves are compare-and-set on (state, epoch). Entering PLACED takes the next epoch. Reports come in",
        "batches from two workers: a report may skip states, never go back; one that another report has overtaken is",
        "late, not illegal.",
        "",
        "| state | meaning | prefill credit | decode credit | next |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ])  # fmt: skip


def _flags(states: Iterable[RequestState]) -> str:
    return ",".join(f"{state}=true" for state in sorted(states))


def _mark(state: RequestState, holders: frozenset[RequestState]) -> str:
    return "held" if state in holders else ""
