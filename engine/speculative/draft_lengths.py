"""How many tokens of each draft are computed, so that a step gives the most tokens a second."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

MIN_GAIN = 1.01
"""How many times as fast a step must promise to be with drafts: below, what drafts cost beside the step decides."""


def choose_lengths(
    chances: SequenceOf[SequenceOf[float]], num_rows: int, max_rows: int, step_s: Callable[[int], float]
) -> list[int]:
    """Return how many tokens of each draft to compute.

    `chances`: of each draft, that its tokens up to this one are right; they fall. A step of `num_rows` gives as many
    tokens without drafts. `max_rows`: of drafts, at most. `step_s`: the seconds of a step by its rows; where it is
    0.0, as before anything was measured, all are computed.

    With the likeliest tokens of all drafts first, the best number of them is one of as many steps as there are tokens:
    (rows + sum of chances) / seconds is looked at for each. So k shrinks as the batch grows, to 0 where no token's
    chance is worth its row.
    """
    order = sorted(
        ((chance, draft, place) for draft, each in enumerate(chances) for place, chance in enumerate(each)),
        key=lambda item: (-item[0], item[2], item[1]),
    )[:max_rows]
    plain_s = step_s(num_rows)
    best, best_speed = 0, num_rows * MIN_GAIN / plain_s if plain_s else 0.0
    expected = float(num_rows)
    for count, (chance, _, _) in enumerate(order, 1):
        expected += chance
        speed = expected / step_s(num_rows + count) if plain_s else expected
        if speed > best_speed:
            best, best_speed = count, speed
    lengths = [0] * len(chances)
    for _, draft, place in order[:best]:
        lengths[draft] = max(lengths[draft], place + 1)
    return lengths
