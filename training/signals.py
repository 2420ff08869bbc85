"""Ctrl-C, SIGTERM and a closed terminal ask a run to stop after the current step; a second Ctrl-C stops it at once, or
after the save that is being written.

With several processes a second signal is ignored: the terminal signals every process, and torchrun does so again.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def stop_signals(*, second_interrupts: bool) -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP are only appended to this list, which begins with a 0; a second one may interrupt."""
    received = [0]

    def receive(number: int, _: FrameType | None) -> None:
        if received[-1] and second_interrupts:
            raise KeyboardInterrupt
        received.append(number)

    handled = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
        handled.append(signal.SIGHUP)
    previous = {number: signal.signal(number, receive) for number in handled}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
