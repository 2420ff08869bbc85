"""The weights that a run begins with: random ones, those of --init-from, with or without an adapter, or of its save."""

from pathlib import Path

import torch

from checkpoints import pretrained
from checkpoints.adapters import fingerprint
from checkpoints.families import load_config
from errors import UserError, reading
from model.decoder import Decoder, attend_to_previous_token, center_residual_writers
from model.lora import add_lora
from training.settings import RunSettings, Settings


def initial_model(settings: Settings, dtype: torch.dtype, last: Path | None = None) -> Decoder:
    """The model on the CPU, with the weights of the checkpoint `last`, else of --init-from, else random ones."""
    run = settings.run
    if run.lora is not None:
        model = lora_model(settings, dtype)
    else:
        model = Decoder(settings.model, seed=run.seed, compute_dtype=dtype)
        if run.previous_token_head and settings.model.attention_bias:
            attend_to_previous_token(model)
        elif run.previous_token_head:
            print("note: --previous-token-head does nothing without --attention-bias")
        if run.init_from is not None and last is None:
            load_parent(model, run)
    if last is not None:
        pretrained.load_weights(model, last)
    return model


def lora_model(settings: Settings, dtype: torch.dtype) -> Decoder:
    """The model of --init-from, frozen, with a new adapter."""
    run = settings.run
    with reading(run.init_from, "the adapter needs the model that its run was started from, at the same path"):
        base = pretrained.open_checkpoint(run.init_from)
        model = pretrained.load_pretrained(base, compute_dtype=dtype, cast=True)
    if model.config != settings.model:
        raise UserError("--lora leaves the model as it is; leave out --norm and other flags of its shape.")
    print(f"weights: those of {run.init_from}, frozen; LoRA of rank {run.lora}")
    path = str(Path(run.init_from).absolute())  # PEFT looks for it from any folder
    alpha = run.lora_alpha or 2 * run.lora
    add_lora(model, {"r": run.lora, "lora_alpha": alpha, "base_model_name_or_path": path}, run.seed)
    model.lora_base = fingerprint(base.tensors)
    return model


def load_parent(model: Decoder, run: RunSettings) -> None:
    """Load the weights of --init-from, converted from LayerNorm to RMSNorm if that is what the norms are."""
    new, dropped = pretrained.load_weights(model, run.init_from)
    print(f"weights: those of {run.init_from}")
    for what, names in (("new", new), ("dropped", dropped)):
        if names:
            print(f"  {len(names)} {what}: {', '.join(names)}")
    parent = load_config(run.init_from)
    is_layer_to_rms = parent.norm == "layer" and model.config.norm == "rms"
    if run.center_weights and is_layer_to_rms and parent.norm_placement == "pre":
        print("  LayerNorm to RMSNorm: weights centered")
        center_residual_writers(model)
