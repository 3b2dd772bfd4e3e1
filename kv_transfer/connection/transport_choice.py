"""The transports that KV can take from one worker to another.

For placement, what each worker publishes before they meet; in the handshake, what the two have in common.
"""

from contracts.errors import ConfigError
from contracts.node import TransferCapabilities
from kv_transfer.connection import layout_negotiation as conversion
from kv_transfer.connection.handshake_frames import Terms

BEST_FIRST = ("nvlink", "shm", "ucx", "tcp")
# For pages on devices: ucx packs them there, the two after it gather them into the host's memory.
BEST_OF_DEVICES = ("nvlink", "ucx", "shm", "tcp")
ONE_HOST = ("nvlink", "shm")
COMPRESSED = ("tcp",)
"""The transports whose messages may be compressed."""


def capabilities_of(terms: Terms) -> TransferCapabilities:
    """Return what a worker can send and receive, for placement.

    Two workers have an entry in common if their handshake would have candidates to try.
    """
    own = [name for name in _best_first(terms.memory) if conversion.may_use(terms, name)]
    named = {name: f"{name}@{terms.boot_id}" if name in ONE_HOST else name for name in own}
    takes = {
        layout.layout_id: [named[name] for name in own if conversion.can_carry(name, layout, terms.layout)]
        for layout in conversion.receivable_layouts(terms)
    }
    return TransferCapabilities(memory=terms.memory, sends=list(named.values()), takes=takes)


def candidates(sender: Terms, receiver: Terms) -> list[str]:
    """Return the transports to try, best first. Raises ConfigError if the two settings contradict."""
    wishes = {sender.transport, receiver.transport} - {"auto"}
    if len(wishes) > 1:
        raise ConfigError(f"transport: prefill wants '{sender.transport}', decode wants '{receiver.transport}'")
    shared = [name for name in sender.available if name in receiver.available]
    if wishes:
        (wish,) = wishes
        if wish not in shared:
            raise ConfigError(
                f"transport '{wish}' is not available on both ends (both have: {', '.join(shared) or 'none'})"
            )
        return [wish]
    if conversion.narrows(sender.layout, receiver.layout):
        return [name for name in conversion.TRANSPORTS if name in shared]
    same_host, best_first = sender.boot_id == receiver.boot_id, _best_first(sender.memory)
    return [name for name in best_first if name in shared and (same_host or name not in ONE_HOST)]


def common_levels(sender: Terms, receiver: Terms, transport: str) -> list[str]:
    """Return the levels of compression that may be used on a link, the most exact first.

    Compressed are bytes that wait for a network in the host's memory, so those over tcp, between equal number formats.
    """
    if transport not in COMPRESSED or conversion.narrows(sender.layout, receiver.layout):
        return []
    return [level for level in sender.levels if level in receiver.levels]


def _best_first(memory: str) -> tuple[str, ...]:
    return BEST_FIRST if memory == "host" else BEST_OF_DEVICES
