"""Ctrl-C, SIGTERM and a closed terminal ask a run to stop after the current step; a second Ctrl-C stops it at once.

With several processes a second signal is ignored: the terminal signals every process, and torchrun does so again.
"""

import signal
from types import FrameType


class StopSignals:
    """Context in which the first SIGINT, SIGTERM or SIGHUP only sets `received`.

    second_signal_interrupts: whether a second one raises KeyboardInterrupt; otherwise it is ignored.
    """

    def __init__(self, *, second_signal_interrupts: bool) -> None:
        self.second_signal_interrupts = second_signal_interrupts
        self.received = 0
        """Number of the newest signal, 0 before the first."""

    def __enter__(self) -> "StopSignals":
        handled = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
            handled.append(signal.SIGHUP)
        self.previous = {number: signal.signal(number, self.receive) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: FrameType | None) -> None:
        if self.received and self.second_signal_interrupts:
            raise KeyboardInterrupt
        self.received = number
