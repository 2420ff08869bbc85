"""Runs side by side, each in a process of its own: on the GPUs there are, or on the cores of a CPU.

Ctrl-C and SIGTERM reach the processes too: each saves its run and ends, and rows of finished runs are kept. When this
process dies in any other way, the others end as well, so that no run is ever trained twice at once.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from ablation import train
from errors import UserError


def in_processes(
    devices: list[str], tasks: list[tuple], start: Callable[..., tuple], finish: Callable[[tuple, dict], None]
) -> bool:
    """Train every task, one at a time on each device; False when a signal stopped it.

    start(task, device) gives the arguments of `train.carry_out`, and finish(task, row) takes what it returns.
    """
    if not tasks:
        return True
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    waiting, free = list(reversed(tasks)), list(devices)
    running: dict[Future, tuple] = {}
    pool = ProcessPoolExecutor(
        min(len(devices), len(tasks)), mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent
    )
    try:
        while running or (waiting and not stopped.is_set()):
            while waiting and free and not stopped.is_set():
                task, device = waiting.pop(), free.pop()
                running[submit(pool, start(task, device))] = task, device
            for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                task, device = running.pop(future)
                free.append(device)
                row = future.result()
                if row is None:
                    stopped.set()
                else:
                    finish(task, row)
            if stopped.is_set():
                for process in multiprocessing.active_children():  # Ctrl-C went to them as well, `kill` did not
                    os.kill(process.pid, signal.SIGTERM)
    except BrokenProcessPool:
        raise UserError("a process was killed, for lack of memory perhaps; try again with fewer --jobs.") from None
    finally:
        pool.shutdown(cancel_futures=True)
        for number, handler in before.items():
            signal.signal(number, handler)
    return not stopped.is_set()


def submit(pool: ProcessPoolExecutor, arguments: tuple) -> Future:
    """Hand over a run; a process that is started for it is born deaf to signals, so that none ends it as it imports."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return pool.submit(train.carry_out, *arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """In a new process: end when the parent has died, and leave signals to the runs, which save before they end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
