"""The settings of a worker's KV transfer."""

from dataclasses import dataclass

from contracts.errors import ConfigError
from kv_transfer.codecs.level import allowed_levels

TRANSPORTS = ("auto", "nvlink", "ucx", "shm", "tcp")


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """The settings of a TransferNode; raises ConfigError on a value that can't work.

    `host`, `port`: where to listen (0: any free port); `advertise_host`: the host that peers are given, `host` if
    empty.
    `transport`: "auto" takes the fastest that both ends have; a name takes that one or fails. `checksum`: between GPUs
    the sender's setting decides. Staging of one link is `num_slots * slot_nbytes`; a page must fit in a slot. A peer
    that is silent for `heartbeat_s * heartbeat_misses` is lost; `stall_timeout_s` is how long a chunk waits for the
    peer to accept bytes. `kv_codec`: see codecs.level.allowed_levels; both ends must allow a level.
    """

    secret: bytes
    transport: str = "auto"
    kv_codec: str = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    checksum: bool = True
    slot_nbytes: int = 960 << 10  # with its header within 1 MiB, beyond which UCX took 1.4 times the CPU
    num_slots: int = 4  # 4 MiB at each end stay in the caches; with twice that UCX took a quarter more CPU
    heartbeat_s: float = 0.25
    heartbeat_misses: int = 12  # EOF shows a dead process at once; 3 misses cut links of a host with 6 jobs a core
    connect_timeout_s: float = 2.0
    handshake_timeout_s: float = 5.0
    stall_timeout_s: float = 5.0
    max_peers: int = 64

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport is '{self.transport}'; it must be one of {', '.join(TRANSPORTS)}")
        allowed_levels(self.kv_codec)  # raises ConfigError
        if not self.secret:
            raise ConfigError("secret is empty: prefill and decode prove to each other that they share it")
        for field in ("slot_nbytes", "num_slots", "heartbeat_s", "heartbeat_misses", "max_peers"):
            if getattr(self, field) <= 0:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be positive")

    @property
    def trial_timeout_s(self) -> float:
        """Return the seconds for the trial of a channel, which leave the handshake time to report."""
        return 0.8 * self.handshake_timeout_s

    @property
    def silence_s(self) -> float:
        return self.heartbeat_s * self.heartbeat_misses
