"""The runs of a comparison on a Ray cluster: `python ablate.py --ray auto`, or with the address of its head.

Ray repeats a run whose process was killed, up to three times. Only this process writes rows.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ablation.execute import Experiment
from ablation.plan import Run
from ablation.run import hardware, train_run

ROOT = Path(__file__).parent.parent
EXCLUDED = [".git", ".cache", "runs", "tests", "docs", "benchmarks/results"]  # of the code that workers get


def join(experiment: Experiment, address: str) -> Callable[[Run, str], Future]:
    """Join the cluster, give its workers this code, and make them those of the experiment: GPUs or else CPUs, all of
    the model that the cluster has most of. Returns the `start` of `execute`.
    """
    ray.init(address, runtime_env={"working_dir": str(ROOT), "excludes": EXCLUDED}, log_to_driver=False)
    kind, device = ("GPU", "cuda") if ray.cluster_resources().get("GPU") else ("CPU", "cpu")
    options = {f"num_{kind.lower()}s": 1, "max_retries": 3}

    def on_node(function: Callable, node: str) -> ray.remote_function.RemoteFunction:
        place = NodeAffinitySchedulingStrategy(node, soft=True)  # soft: on another where it has died
        return ray.remote(function).options(scheduling_strategy=place, **options)

    counts = {node["NodeID"]: int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]}
    models = {node: ray.get(on_node(hardware, node).remote(device)) for node, count in counts.items() if count}
    most = Counter(name for node, name in models.items() for _ in range(counts[node])).most_common(1)[0][0]
    experiment.hardware = most
    experiment.workers = [node for node, name in models.items() if name == most for _ in range(counts[node])]
    threads = 1 if device == "cpu" else None

    def start(run: Run, node: str) -> Future:
        return on_node(train_run, node).remote(experiment.plan, run, device, threads, len(experiment.workers)).future()

    return start
