"""LoRA adapters in PEFT's format: A and B of each matrix, which are added to the weights of a model as it is loaded."""

import math
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from errors import read_json, reading

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's names for tensors; what follows is Hugging Face's
# Keys of adapter_config.json with the values that are supported; those in KNOWN may have any, all others must be off.
SUPPORTED = {"peft_type": ("LORA",), "init_lora_weights": (True, False, "gaussian")}
KNOWN = """
    r lora_alpha use_rslora target_modules exclude_modules layers_to_transform layers_pattern lora_dropout revision
    base_model_name_or_path task_type inference_mode peft_version auto_mapping megatron_core runtime_config
    qalora_group_size
""".split()


def add_adapter(weights: Mapping[str, Tensor], directory: Path) -> None:
    """Add (alpha / r) B A to the weights, by their names in files: in float32, rounded once to the weight's dtype."""
    fields = {"peft_type": None, **read_json(directory / CONFIG)}
    with reading(directory, "give a plain LoRA adapter of this model, or the result of peft's merge_and_unload()"):
        for key, value in fields.items():
            if key not in KNOWN and value not in SUPPORTED.get(key, (None, False, "none", [], {})):
                raise ValueError(f"{key} {value!r} is not supported")
        scale = fields["lora_alpha"] / (math.sqrt(fields["r"]) if fields.get("use_rslora") else fields["r"])
        tensors = load_file(directory / WEIGHTS)
        for matrix in [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]:
            weight = weights[f"{matrix.removeprefix(PREFIX)}.weight"]
            a, b = (tensors.pop(f"{matrix}.lora_{letter}.weight").to(weight.device).float() for letter in "AB")
            weight.copy_(weight.float() + scale * (b @ a))
        if tensors:
            raise ValueError(f"{min(tensors)} is not supported")
