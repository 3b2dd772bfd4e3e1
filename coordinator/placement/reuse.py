"""What a prompt's prefix is worth that a worker does not have in its KV cache, and could load or pull.

The worker decides by the same sum when it begins (engine.cache.load_plan), by what it finds then.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from coordinator.placement.candidate import Candidate, HeldPrefix

PULL_S = 0.005
"""What a pull takes before its first token: the messages, and the step that is under way at the other worker."""


def with_load(candidate: Candidate, num_tokens: int) -> Candidate:
    """Return a candidate that loads what saves the most time of a prompt, if anything does.

    `num_tokens`: of the prompt. What is loaded is a prefix: from its own tiers, each part from the fastest that has it,
    or all from another worker. What is in its cache is not loaded, and what several hold counts once. Rates must be
    known.
    """
    tiers = [prefix for prefix in candidate.held if not prefix.is_peer]
    peers = [prefix for prefix in candidate.held if prefix.is_peer]
    missing = candidate.cached_tokens, num_tokens - 1
    options = [(*option, False) for option in _loads(tiers, *missing)]
    options += [(*option, True) for peer in peers for option in _loads([peer], *missing)]
    best, saved_s = candidate, 0.0
    for end, load_s, is_pulled in options:
        loaded = end - candidate.cached_tokens
        if loaded / candidate.prefill_rate - load_s > saved_s:
            saved_s = loaded / candidate.prefill_rate - load_s
            best = replace(candidate, loaded_tokens=loaded, load_s=load_s, is_pulled=is_pulled)
    return best


def _loads(held: Sequence[HeldPrefix], first_token: int, last_token: int) -> list[tuple[int, float]]:
    """Return where each load of tokens between these may end, and how long it takes."""
    found: list[tuple[int, float]] = []
    done, load_s = first_token, 0.0
    for prefix in sorted(held, key=lambda prefix: -prefix.tokens_per_s):
        end = min(prefix.num_tokens, last_token)
        if end > done:
            load_s += prefix.latency_s + (end - done) / prefix.tokens_per_s
            done = end
            found.append((done, load_s))
    return found
