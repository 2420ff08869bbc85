"""Which device a name means, and what follows from the device alone, the same in every run on it."""

import torch

import kernels
from errors import UserError

TYPES = ("cpu", "cuda", "mps")  # torch has others, such as meta, whose tensors hold no numbers


def choose_device(name: str) -> torch.device:
    """The device that a `--device` value means; `auto` is CUDA, else MPS, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in TYPES:
            raise UserError(f"--device {name} is of no type that models run on; use auto, cpu, cuda or mps.")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used here ({reason}); --device auto takes what there is.") from None
    return device


def choose_kernels(name: str, device: torch.device) -> None:
    """Set what a `--kernels` value means on a device, for this process."""
    try:
        kernels.use(name, device)
    except ValueError as error:
        raise UserError(f"{error}; use --kernels auto, which takes what can.") from None


def fast_at_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in instructions of its own.

    CUDA from compute capability 8.0 on; a CPU with AVX-512-BF16 or AMX; MPS is taken not to. A rule and no measurement:
    the dtype of a run must not depend on how busy the machine was when it began.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        # Private to torch, hence the default: a version without them computes in float32, which is right everywhere.
        questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, question, bool)() for question in questions)
    return False
