"""A worker's HTTP face before a core that only remembers what it was sent. Not a test."""

from tests.nodes import node_info
from worker.front import FrontState
from worker.streams import EventStreams


class RememberingCore:
    def __init__(self) -> None:
        self.sent: list = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def make_state() -> FrontState:
    info = node_info()
    streams = EventStreams(info.worker_id, info.incarnation)
    return FrontState(info, "s3cret", RememberingCore(), streams, 10.0, "digest")  # type: ignore[arg-type]
