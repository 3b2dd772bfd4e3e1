"""Workers that can't do what they are there for, and why, in words for the log and /ready."""

from collections.abc import Sequence

from contracts.ids import WorkerId
from contracts.node import NodeInfo, WorkerRole


def incompatible_workers(infos: Sequence[NodeInfo], model: str) -> dict[WorkerId, str]:
    """Return the workers of another model, and those that can exchange KV with none of the other side."""
    words = {
        info.worker_id: f"it serves {info.model}, this gateway speaks for {model}: name the same model for both"
        for info in infos
        if info.model != model
    }
    fit = [info for info in infos if info.model == model]
    sources = [info for info in fit if info.role != WorkerRole.DECODE]
    sinks = [info for info in fit if info.role != WorkerRole.PREFILL]
    sent = {word for source in sources for word in source.send_words}
    for info in sinks:
        if info.role == WorkerRole.DECODE and sources and not info.can_receive_any(sent):
            field, there, here, remedy = _difference(sources[0], info)
            what = f"it can't take the KV of {sources[0].worker_id}"
            words[info.worker_id] = f"{what}: {field} is {here} here, {there} there{remedy}"
    sinks = [info for info in sinks if info.worker_id not in words]  # the others' words speak for both sides
    received = {word for sink in sinks for word in sink.receive_words}
    for info in sources:
        if info.role == WorkerRole.PREFILL and sinks and received.isdisjoint(info.send_words):
            field, here, there, remedy = _difference(info, sinks[0])
            what = f"{sinks[0].worker_id} can't take its KV"
            words[info.worker_id] = f"{what}: {field} is {here} here, {there} there{remedy}"
    return words


def _difference(source: NodeInfo, sink: NodeInfo) -> tuple[str, object, object, str]:
    """The field in which they differ, its two values, and what to do about it."""
    sent, taken = source.ways, sink.ways
    if sent.memory != taken.memory:
        return "memory", sent.memory, taken.memory, ": run prefill and decode on the same kind of device"
    if source.model_layout_id in taken.takes:
        out, into = _transports(sent.sends, taken.takes[source.model_layout_id])
        return "transfer", out, into, ": leave --transfer at auto for both"
    found = None
    if source.layout is not None and sink.layout is not None:
        found = source.layout.model_part.difference(sink.layout.model_part)
    remedy = ": start all with the same model and --dtype, and native kernels for all or none (tandem doctor)"
    return (*found, remedy) if found else ("layout_id", source.layout_id, sink.layout_id, "")


def _transports(sent: Sequence[str], taken: Sequence[str]) -> tuple[str, str]:
    """Their names; the hosts', too, if nothing but these differs."""
    sides = [[way.partition("@")[0] for way in ways] for ways in (sent, taken)]
    if not set(sides[0]).isdisjoint(sides[1]):
        sides = [sent, taken]
    first, second = ("/".join(side) or "unavailable" for side in sides)
    return first, second
