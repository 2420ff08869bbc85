"""Run tasks in parallel, each in its own process: one per GPU, or several on the cores of a CPU.

Ctrl-C and SIGTERM reach the processes too: each saves its run and ends, and records of finished runs are kept. When
this process dies in any other way, the others end as well, so that no run is ever trained twice at once.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from errors import UserError

Result = TypeVar("Result")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_in_processes(
    devices: list[str],
    tasks: list[Callable[[str], Result | None]],
    on_result: Callable[[Result], object],
) -> bool:
    """Call every task with a device, one task at a time on each; False when a signal stopped them.

    A task is picklable, and returns None when a signal stopped it.
    """
    if not tasks:
        return True
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in SIGNALS}
    waiting, free = list(reversed(tasks)), list(devices)
    running: dict[Future, str] = {}
    failure: UserError | None = None
    pool = ProcessPoolExecutor(
        min(len(devices), len(tasks)), mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent
    )
    try:
        while running or (waiting and not stopped.is_set()):
            while waiting and free and not stopped.is_set():
                task, device = waiting.pop(), free.pop()
                running[submit(pool, task, device)] = device
            for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                free.append(running.pop(future))
                try:
                    result = future.result()
                except UserError as error:  # what the others have finished is kept, and they save the rest
                    failure = failure or error
                    result = None
                if result is None:
                    stopped.set()
                else:
                    on_result(result)
            if stopped.is_set():
                for process in multiprocessing.active_children():  # Ctrl-C reached them as well, `kill` did not
                    os.kill(process.pid, signal.SIGTERM)
    except BrokenProcessPool:
        raise UserError("a process was killed, perhaps for lack of memory; try again with fewer --jobs.") from None
    finally:
        pool.shutdown(cancel_futures=True)
        for number, handler in before.items():
            signal.signal(number, handler)
    if failure is not None:
        raise failure
    return not stopped.is_set()


def submit(pool: ProcessPoolExecutor, task: Callable, device: str) -> Future:
    """Submit a task; signals are ignored while its process starts, so that none kills it during its imports."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        return pool.submit(task, device)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """In a new process: end when the parent has died, and leave signals to the runs, which save before they end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
