"""`train.py --processes N`: the same command in N processes of this machine.

Ours instead of torchrun, which prints a traceback of 40 lines and exits with status 1 whatever ends a process, and
kills processes 30 seconds after Ctrl-C, while they may still be saving. Runs over several machines are torchrun's.
"""

import os
import signal
import socket
import subprocess
import sys
import time

from errors import usable_cores

PATIENCE = 10  # seconds for the other processes to end by themselves, and again after SIGTERM


def launch(count: int, command: list[str]) -> int:
    """Run `command` in `count` processes; returns the main one's exit status, or that of one that failed without it.

    Every process sees the variables that torchrun would set. The main one prints errors; one that was killed cannot.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    children = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    signal.signal(signal.SIGTERM, lambda number, _: [child.send_signal(number) for child in children])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to every process
    main = children[0]
    while all(child.poll() in (None, 0) for child in children) and any(child.poll() is None for child in children):
        time.sleep(0.1)
    failed = next((child for child in children if child.poll()), main)
    patience = 0 if main.poll() else PATIENCE
    for stop, seconds in ((subprocess.Popen.terminate, patience), (subprocess.Popen.kill, PATIENCE)):
        deadline = time.monotonic() + seconds
        for child in children:
            try:
                child.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                stop(child)
    for child in children:
        child.wait()
    status = main.returncode if main.returncode > 0 else failed.returncode
    if status < 0:
        rank, name = children.index(failed), signal.Signals(-status).name
        print(f"error: process {rank} was killed ({name}); resume with --resume and the run's folder.", file=sys.stderr)
    return status if status >= 0 else 128 - status
