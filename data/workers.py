"""Processes that make units complete: all of a text at once, or those of the Hub some ahead of training.

Each goes through all units in order, and locks decide who makes which (see `units`), so other commands and other
machines may join at any time.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time

from tqdm import tqdm

from data.units import MAX_REASONS, Store, Unit
from errors import usable_cores

SHOW_PROGRESS = 32_000_000  # bytes of text below which there is no progress bar
SPAWN = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork


class Workers:
    """`count` processes that make the first `limit` units complete. They end with this process, however it ends."""

    def __init__(self, store: Store, units: list[Unit], count: int, limit: int):
        self.done, self.limit, self._errors = SPAWN.Value("q"), SPAWN.Value("q", limit), SPAWN.SimpleQueue()
        arguments = (store, units, usable_cores() // count, self.done, self.limit, self._errors)
        self._processes = [SPAWN.Process(target=work, args=arguments, daemon=True) for _ in range(count)]
        for process in self._processes:
            process.start()

    def are_working(self) -> bool:
        """Whether any of them has not ended; raises what one of them raised."""
        if not self._errors.empty():
            raise self._errors.get()
        return any(process.is_alive() for process in self._processes)


def work(store: Store, units: list[Unit], threads: int, done: object, limit: object, errors: object) -> None:
    """What one of the `Workers` does; `done`: characters that all of them have encoded."""

    def report(count: int) -> None:
        with done.get_lock():
            done.value += count

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C does
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # of the tokenizers library
    try:
        for number, unit in enumerate(units):
            while number >= limit.value:
                time.sleep(0.5)
            store.prepare(unit, report)
    except Exception as error:
        errors.put(error)


def prepare_units(store: Store, units: list[Unit]) -> None:
    """Make every unit complete, with a process per core; print what was skipped, and a progress bar for large texts."""
    store.folder.mkdir(parents=True, exist_ok=True)
    new = missing = [unit for unit in units if store.facts(unit) is None]
    size = sum(unit.text_bytes for unit in missing)
    with tqdm(desc="tokenizing", total=size, unit="B", unit_scale=True, disable=size < SHOW_PROGRESS) as bar:
        if len(missing) > 1:
            workers = Workers(store, missing, min(usable_cores(), len(missing)), len(missing))
            while workers.are_working():
                bar.update(workers.done.value - bar.n)
                time.sleep(0.5)
        waiting = False
        while missing := [unit for unit in missing if not store.prepare(unit, bar.update)]:
            if not waiting:
                bar.write("waiting for another process that prepares the same text ...", file=sys.stderr)
            waiting = True
            time.sleep(0.5)
    facts = [store.facts(unit) for unit in new]
    for reason in [reason for one in facts for reason in one["reasons"]][:MAX_REASONS]:
        print(f"skipped: {reason}", file=sys.stderr)
    if (count := sum(one["skipped"] for one in facts)) > MAX_REASONS:
        print(f"skipped: {count:,} in all", file=sys.stderr)
