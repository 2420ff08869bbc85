"""The runs of a comparison on a real Ray cluster on this machine, one worker of which is killed."""

import dataclasses
import functools
import threading
import time

import pytest

from ablation import execute
from ablation.plan import Plan

ray = pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")


@pytest.fixture
def address():
    """A head without CPUs and two workers with one each, as processes of their own."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_twelve_runs_on_two_workers_of_which_one_is_killed_are_those_of_the_local_pool(address, config, here, tmp_path):
    from ablation import cluster

    norms = {"norm": ["layer", "rms", "none"]}
    plan = Plan(config=str(config), vary=norms, seeds=4, rerun_seeds=0, learning_rates=(2e-2,))
    local, spread = (execute.load_experiment(plan, tmp_path / name, "cpu", 1) for name in ("local", "cluster"))
    for experiment in (local, spread):
        execute.write_plan(experiment)
    execute.execute(local, here(local))
    killed = []

    def kill_a_worker() -> None:
        while not killed:
            time.sleep(0.02)
            for process in psutil.process_iter(["cmdline"]) if len(spread.rows) >= 4 else ():
                if not killed and any("ray::train_run" in word for word in process.info["cmdline"] or ()):
                    process.kill()
                    killed.append(process.pid)

    threading.Thread(target=kill_a_worker, daemon=True).start()
    spread.device, spread.workers, start = cluster.join(address)
    execute.execute(spread, functools.partial(start, spread))
    assert killed and not [row for row in spread.rows if row.status == "failed"]
    same = {"seconds": 0, "all_seconds": 0, "workers": 0}  # apart from these, the rows are equal
    ours, theirs = ({(r.arm, r.seed): dataclasses.replace(r, **same) for r in e.rows} for e in (spread, local))
    assert ours == theirs and len(ours) == 12
