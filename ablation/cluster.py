"""The runs of a plan on a Ray cluster, which repeats killed ones. Only this process writes rows."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ablation.plan import Run
from ablation.run import train_run
from model.machine import device_model

EXCLUDED = [".git", ".cache", "runs", "tests", "docs", "studies", "speed"]  # what workers do not need


def join(address: str) -> tuple[str, list[str], int | None, Callable]:
    """`execute.Workers` on the most frequent model of GPU, else CPU, of a cluster: a slot is the node of a device."""
    root = str(Path(__file__).parent.parent)
    ray.init(address, runtime_env={"working_dir": root, "excludes": EXCLUDED}, log_to_driver=False)
    kind, torch_device = ("GPU", "cuda") if ray.cluster_resources().get("GPU") else ("CPU", "cpu")
    options = {f"num_{kind.lower()}s": 1, "max_retries": 3}

    def on_node(function: Callable, node: str) -> ray.remote_function.RemoteFunction:
        place = NodeAffinitySchedulingStrategy(node, soft=True)  # soft: on another where it has died
        return ray.remote(function).options(scheduling_strategy=place, **options)

    devices_by_node = {node["NodeID"]: int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]}
    nodes = [*Counter(devices_by_node).elements()]
    models = {node: ray.get(on_node(device_model, node).remote(torch_device)) for node in {*nodes}}
    device = Counter(models[node] for node in nodes).most_common(1)[0][0]
    slots = [node for node in nodes if models[node] == device]
    threads = 1 if kind == "CPU" else None

    def start(experiment, run: Run, node: str) -> Future:
        return on_node(train_run, node).remote(experiment.plan, run, torch_device, threads, len(slots)).future()

    return device, slots, threads, start
