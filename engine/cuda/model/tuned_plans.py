"""The tile sizes that `python -m kernels.tune` found for this card."""

import logging
from pathlib import Path

from engine.cuda.runtime.process_group import ProcessGroup
from kernels.caps import Caps
from kernels.plans import TunedPlans, TuningRefused, cache_path, decode, encode, load

_log = logging.getLogger(__name__)


def agreed_plans(cache_dir: Path, caps: Caps, group: ProcessGroup) -> TunedPlans:
    """Return the plans that the first process of a group finds, for all of them.

    Processes that cut products up differently would round differently. None are found where the file is of another card
    or other versions; a warning says so.
    """
    found = _found(cache_path(cache_dir / "kernels", caps), caps) if group.shard.rank == 0 else TunedPlans()
    return decode(group.exchange("plans", encode(found).encode())[0].decode())


def _found(path: Path, caps: Caps) -> TunedPlans:
    try:
        plans = load(path, caps)
    except TuningRefused as refused:
        _log.warning("%s", refused)
        return TunedPlans()
    if plans.tuned:
        _log.info("kernels take the tile sizes of %s, for %d shapes", path, len(plans.tuned))
    return plans
