"""What is known of the device, and what it lacks."""

import torch

from training import machine
from training.loop import train
from training.settings import parse


def test_the_peak_is_known_for_devices_in_the_table_alone(monkeypatch):
    names = {
        "NVIDIA H200": 989e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40": None,
        "NVIDIA A10G": None,
        "NVIDIA H100 PCIe": 756e12,
    }
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert machine.peak_flops(torch.device("cuda"), torch.bfloat16) == peak
    assert machine.peak_flops(torch.device("cuda"), torch.float32) is None
    assert machine.peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_compiling_without_a_compiler_is_said_in_one_line(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    train(parse([*flags, "--compile", "--steps", "2"], "test").settings, tmp_path / "run")
    assert "no C++ compiler found" in capsys.readouterr().out
