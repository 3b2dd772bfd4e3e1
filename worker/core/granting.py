"""The pages that a peer is granted, group by group."""

from collections.abc import Sequence

from contracts.handoff import Grant
from engine.engine import Engine
from engine.messages import Reservation
from worker.core.role_handler import AttemptId


def granted(
    id_: AttemptId, engine: Engine, reservation: Reservation, groups: Sequence[int], num_here: int, num_known: int
) -> Grant:
    """Return the Grant of the pages behind the first `num_here` tokens, of each of `groups`.

    The KV of `num_known` tokens comes, or of more: of groups of short life only what is needed behind these.
    """
    layout, all_skips = engine.layout, engine.layout.skips(num_here, num_known)
    skips = [all_skips[group] for group in groups]
    pages = [
        engine.groups.pages(group, reservation.blocks[skip // layout.block_size :])
        for group, skip in zip(groups, skips, strict=True)
    ]
    request_id, epoch = id_
    return Grant(request_id, epoch, pages, num_here, skips)
