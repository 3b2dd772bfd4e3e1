"""The account of an answer's time, from what the gateway saw and its two workers reported."""

from collections.abc import Mapping

GATEWAY = ("receive", "prepare", "place")
"""The gateway's own: until the body was here; template, tokens, grammar; until it had a place."""
PREFILL = {"queue": "prefill_queue", "load": "prefill_load", "prefill": "prefill_prefill"}
"""Stage -> its name in `Answer.stages_s`, in the order of time: from the job to token 0. `load`: only where KV was
asked of a tier below the cache.
"""
_NEEDED = {"prefill_queue", "prefill_prefill"}
HANDED_OVER = {"expect": "expect", "land": "land", "join": "queue", "decode": "decode"}
"""The other worker's: from the job to the offer, to the last chunk, to the next batch, to the end."""
STAYED = {"decode": "decode"}
"""One worker did both: its account repeats the prefill side's."""
REPLAY = "replay"
"""From the last token of a worker that was lost to the next one from elsewhere. Of how that one came to its tokens
nothing is kept: `replay` has it.
"""

MIGRATE = "migrate"
"""From the last token of the worker that an answer left, while it went on, to the first of the one where it goes on."""


def stage_seconds(account: Mapping[str, float]) -> dict[str, float]:
    """Stage -> seconds, as far as they are known."""
    names = {stage: stage for stage in (*GATEWAY, REPLAY, MIGRATE)} | PREFILL | decode_stages(account)
    return {stage: account[name] for stage, name in names.items() if name in account}


def decode_stages(account: Mapping[str, float]) -> dict[str, str]:
    return STAYED if "prefill" in account else HANDED_OVER


def non_overlapped_transfer_s(account: Mapping[str, float]) -> float | None:
    """How long after token 0 decode had the last chunk: what a client can feel of the handoff.

    None if there was none.

    Both accounts begin when the job comes, which is posted to both workers at once; clocks of hosts are not compared.
    """
    if not {"expect", "land", *_NEEDED} <= account.keys():
        return None
    return max(0.0, account["expect"] + account["land"] - _prefill_s(account))


def decode_s(account: Mapping[str, float], span_s: float) -> float:
    """The stage of an answer whose end no worker told: it went on for `span_s` behind token 0.

    Decode began when it joined the batch, by its own account.
    """
    if not {*HANDED_OVER.values(), *_NEEDED} - {"decode"} <= account.keys():
        return span_s
    joined_s = account["expect"] + account["land"] + account["queue"] - _prefill_s(account)
    return max(0.0, span_s - joined_s)


def _prefill_s(account: Mapping[str, float]) -> float:
    return sum(account.get(name, 0.0) for name in PREFILL.values())
