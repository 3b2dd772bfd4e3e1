"""The states of a request and the legal moves between them, as data.

The scripts in Redis, the memory twin and docs/request-states.md are made from this table.
"""

from collections.abc import Iterable
from enum import StrEnum


class State(StrEnum):
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


class Verdict(StrEnum):
    """What becomes of a reported move. LATE: true when it was told, overtaken since by what others told."""

    LEGAL = "legal"
    LATE = "late"
    ILLEGAL = "illegal"


MEANING = {
    State.PLACED: "a route and its credits are taken",
    State.QUEUED: "the prefill worker has the job",
    State.RESERVING: "prefill computes; decode is asked for pages",
    State.HELD: "decode has no pages yet; prefill keeps its own",
    State.TRANSFERRING: "decode granted pages; chunks are on their way",
    State.LOCAL_DECODE: "the worker that computed the prompt decodes",
    State.COMMITTED: "decode has every chunk and decodes",
    State.FINISHED: "the answer is complete",
    State.FAILED: "the answer will not come",
    State.CANCELLED: "nobody wants the answer any more",
}

STEPS: dict[State, tuple[State, ...]] = {
    State.PLACED: (State.QUEUED,),
    State.QUEUED: (State.RESERVING,),
    State.RESERVING: (State.HELD, State.TRANSFERRING, State.LOCAL_DECODE),
    State.HELD: (State.TRANSFERRING, State.LOCAL_DECODE),
    State.TRANSFERRING: (State.COMMITTED,),
    State.LOCAL_DECODE: (),
    State.COMMITTED: (),
}
"""What follows what within one attempt. Besides, any live request can end and be placed again, which begins the next
attempt: MOVES.
"""

_CLOSINGS = (State.FINISHED, State.FAILED, State.CANCELLED)
ENDS = frozenset(_CLOSINGS)
LIVE = tuple(state for state in State if state not in ENDS)

HOLDS_PREFILL = frozenset({State.PLACED, State.QUEUED, State.RESERVING, State.HELD, State.TRANSFERRING})
"""While in these, the prompt counts as work of the prefill worker.

HELD too: pages that decode can't take press back.
"""

HOLDS_DECODE = HOLDS_PREFILL | {State.LOCAL_DECODE, State.COMMITTED}


def _reachable(state: State) -> frozenset[State]:
    """Within the same attempt: not through PLACED, but that itself is a next step."""
    found: set[State] = set()
    todo = [state]
    while todo:
        for following in MOVES.get(todo.pop(), ()):
            if following not in found:
                found.add(following)
                if following is not State.PLACED:
                    todo.append(following)
    return frozenset(found)


MOVES: dict[State, tuple[State, ...]] = {state: (*STEPS[state], State.PLACED, *_CLOSINGS) for state in LIVE}

REACHABLE: dict[State, frozenset[State]] = {state: _reachable(state) for state in LIVE}
"""What may be reported in each state. Two workers report in batches, each on its own, and may lose some while Redis is
away: a report may skip states, never go back."""


def judge(state: State, to: State) -> Verdict:
    """Whether a request in `state` may enter `to`; the epoch is the caller's to check."""
    if to in REACHABLE.get(state, frozenset()):
        return Verdict.LEGAL
    if to == state or state in REACHABLE.get(to, frozenset()):
        return Verdict.LATE
    return Verdict.ILLEGAL


def require_end(state: State) -> None:
    """Raises ValueError."""
    if state not in ENDS:
        raise ValueError(f"a request can't end as {state}; it ends as one of {', '.join(sorted(ENDS))}")


def to_lua() -> str:
    """The table as Lua locals: VERDICT[state][to], HOLDS_PREFILL, HOLDS_DECODE, ENDS."""
    rows = (f"{state}={{{','.join(f'{to}={judge(state, to).value!r}' for to in State)}}}" for state in State)
    sets = {"HOLDS_PREFILL": HOLDS_PREFILL, "HOLDS_DECODE": HOLDS_DECODE, "ENDS": ENDS}
    lines = [f"local VERDICT = {{{','.join(rows)}}}"]
    return "\n".join([*lines, *(f"local {name} = {{{_flags(states)}}}" for name, states in sets.items())])


def to_markdown() -> str:
    """The table for docs/request-states.md."""
    rows = [
        f"| {state} | {MEANING[state]} | {_mark(state, HOLDS_PREFILL)} | {_mark(state, HOLDS_DECODE)} "
        f"| {', '.join(MOVES.get(state, ())) or 'nothing: the end'} |"
        for state in State
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


def _flags(states: Iterable[State]) -> str:
    return ",".join(f"{state}=true" for state in sorted(states))


def _mark(state: State, holders: frozenset[State]) -> str:
    return "held" if state in holders else ""
