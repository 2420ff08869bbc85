"""LoRA adapters in PEFT's format: A and B of each matrix, which are added to the weights of a model as it is loaded."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.weights import ADAPTER_CONFIG, StoredTensor, find_weight_files
from errors import note, reading
from files import read_json

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's names of tensors begin with it, and continue like Hugging Face's
# adapter_config.json: keys that may have any value, and the values that every other key may have.
ANY_VALUE = """
    r lora_alpha use_rslora target_modules exclude_modules layers_to_transform layers_pattern lora_dropout revision
    base_model_name_or_path task_type inference_mode peft_version auto_mapping megatron_core runtime_config
    qalora_group_size
""".split()
SUPPORTED = {"peft_type": ("LORA",), "init_lora_weights": (True, False, "gaussian")}
OFF = (None, False, "none", [], {})


def add_adapter(weights: Mapping[str, Tensor], directory: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Add (alpha / r) B A to the weights, by their names in files: in float32, then rounded to the weight's dtype."""
    with reading(directory, "give a plain LoRA adapter of this model, or the result of peft's merge_and_unload()"):
        rank, scale = rank_and_scale(read_json(directory / ADAPTER_CONFIG))
        [path] = find_weight_files(directory, WEIGHTS)
        tensors = load_file(path)
        with safe_open(path, framework="pt") as file:
            base = (file.metadata() or {}).get("base")
        if base and base != fingerprint(stored):
            note(f"the weights are not those that {directory} was trained for: give that model, or train it again")
        for matrix in sorted({name.partition(".lora_")[0] for name in tensors if ".lora_" in name}):
            a = tensors.pop(f"{matrix}.lora_A.weight")
            b = tensors.pop(f"{matrix}.lora_B.weight")
            weight = weights[f"{matrix.removeprefix(PREFIX)}.weight"]
            if (a.shape, b.shape) != ((rank, weight.shape[-1]), (len(weight), rank)):
                raise ValueError(f"{matrix} has sizes {[*a.shape]} and {[*b.shape]}, and r is {rank}")
            weight.copy_(weight.float() + scale * (b.to(weight.device).float() @ a.to(weight.device).float()))
        for name, tensor in tensors.items():  # beside A and B of the head, PEFT writes a copy of the model's head
            original = stored.get(name.removeprefix(PREFIX).replace(".base_layer.", "."))
            if original is None or not torch.equal(original.read().to(tensor.dtype), tensor):
                raise ValueError(f"{name} is not supported")


def fingerprint(stored: Mapping[str, StoredTensor]) -> str:
    """A hash of the last norm's weight, which every step that trains the model changes; "" where a norm has none."""
    last_norm = stored.get("model.norm.weight")
    return "" if last_norm is None else hashlib.sha256(last_norm.read().float().numpy()).hexdigest()[:16]


def rank_and_scale(fields: dict) -> tuple[int, float]:
    """r, and what B A is multiplied by; `ValueError` if adapter_config.json asks for what is not supported."""
    for key, value in ({"peft_type": None} | fields).items():  # without that key it is no LoRA adapter
        if key not in ANY_VALUE and value not in SUPPORTED.get(key, OFF):
            raise ValueError(f"{key} {value!r} is not supported")
    rank, alpha = fields["r"], fields["lora_alpha"]
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ValueError(f"r {rank!r} with lora_alpha {alpha!r} is not supported")
    return rank, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
