"""What output and records say of the machine, and of the versions that computed on it."""

import platform
import subprocess
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """A name to print: the GPU's model, or the number of threads on a CPU."""
    if device.type == "cpu":
        return f"CPU (threads: {torch.get_num_threads()})"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def device_model(name: str) -> str:
    """The model of the GPU of this name, or else of the CPU."""
    if name.startswith("cuda"):
        return torch.cuda.get_device_name(name)
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit of this project, with a + if files have changed since; empty where git knows none."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return ""


def machine(device: torch.device) -> dict[str, str | int | None]:
    """What a record says of the machine and of the versions that computed it."""
    threads = None if device.type == "cuda" else torch.get_num_threads()
    versions = {"commit": commit(), "torch": str(torch.__version__), "python": platform.python_version()}
    return {"device": device_model(str(device)), "threads": threads} | versions
