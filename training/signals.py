"""Ctrl-C and SIGTERM ask a run to stop after the step it is in; a second Ctrl-C stops it at once.

With several processes repeats are ignored: the terminal signals each of them, and torchrun then does so again.
"""

import signal
from types import FrameType


class StopSignals:
    """Context in which the first SIGINT or SIGTERM only sets `received`."""

    def __init__(self, *, heed_repeats: bool) -> None:
        self.heed_repeats = heed_repeats
        self.received = 0
        """Number of the signal, 0 while there was none."""

    def __enter__(self) -> "StopSignals":
        self.before = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: FrameType | None) -> None:
        """Remember the signal; a second one raises KeyboardInterrupt."""
        if self.received and self.heed_repeats:
            raise KeyboardInterrupt
        self.received = number
