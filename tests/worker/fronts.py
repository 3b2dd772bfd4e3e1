"""A worker's HTTP face before a core that only remembers what it was sent. Not a test."""

from contracts.node import NodeLoad
from process.thread_times import ThreadTimes
from tests.nodes import node_info
from worker.front.event_streams import EventStreams
from worker.front.worker_state import WorkerState
from worker.messages import CoreStatus, LevelStatus, LinkStatus


class RememberingCore:
    def __init__(self) -> None:
        self.sent: list = []
        self.threads = ThreadTimes({1: 0.0}, is_runnable=False)

    def look_at_threads(self) -> ThreadTimes:
        return self.threads

    def send(self, message: object) -> None:
        self.sent.append(message)


def make_state() -> WorkerState:
    info = node_info()
    streams = EventStreams(info.worker_id, info.incarnation)
    return WorkerState(info, "s3cret", RememberingCore(), streams, 10.0, "digest")  # type: ignore[arg-type]


def make_status(num_turns: int) -> CoreStatus:
    levels = {"4bit": LevelStatus(800, 100, 0.5)}
    links = [LinkStatus("d", True, "ucx", "tcp/lo", "open", {"nbytes": 5.0}, 7e9, levels)]
    return CoreStatus(
        num_turns, 7, NodeLoad(num_running=3), {"prefill_tokens": 11.0}, {"running": 3.0, "requests": 3.0}, links, False
    )
