"""What a run would need, without training: parameters, tokens, FLOPs and memory (`--dry-run`).

The memory of the activations comes from no formula: the forward pass runs on fake tensors, which have shapes but no
values, and the sizes of the tensors that autograd would keep for the backward pass are added up.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model.config import ModelConfig
from model.count import flops_per_token, layer_matrices, num_parameters
from model.decoder import Decoder
from training.settings import Settings


def estimate(settings: Settings) -> str:
    """A few lines to print; memory is that of one process, without fragmentation in the allocator."""
    model, data, steps = settings.model, settings.data, settings.optimizer.steps
    parameters, inner = num_parameters(model), num_parameters(model, embedding=False)
    sequences = data.micro_batch_size or data.batch_size
    tokens = steps * data.batch_size * data.sequence_length
    flops = flops_per_token(model, data.sequence_length)
    dtype = torch.bfloat16 if settings.machine.dtype == "auto" else getattr(torch, settings.machine.dtype)
    kept = activation_bytes(
        model, sequences, data.sequence_length, dtype, checkpointing=settings.machine.activation_checkpointing
    )
    weights = 4 * parameters  # float32
    moments = 8 * parameters  # two of AdamW
    if settings.optimizer.optimizer == "muon":
        moments -= 4 * model.num_hidden_layers * layer_matrices(model)  # one of Muon
    lines = {
        "model": f"{parameters:,} parameters, {parameters - inner:,} of them embeddings; {model.norm} norm",
        "training": f"{tokens:,} tokens in {steps:,} steps of {data.batch_size} sequences of {data.sequence_length}",
        "compute": f"{flops * tokens:.2e} FLOPs, {flops / 1e6:,.1f} million per token",
        "memory": f"{format_bytes(2 * weights + moments + kept)}: weights {format_bytes(weights)}, "
        f"gradients {format_bytes(weights)}, moments {format_bytes(moments)}, activations {format_bytes(kept)} "
        f"for {sequences} sequences in {str(dtype)[6:]} on a CPU (a GPU in plain PyTorch keeps about twice as many)",
        "disk": f"{format_bytes(weights + moments)} in last/, {format_bytes(weights)} in best/, twice that in a save",
    }
    return "\n".join(f"{name:9} {line}" for name, line in lines.items())


def activation_bytes(
    config: ModelConfig, sequences: int, length: int, dtype: torch.dtype, *, checkpointing: bool
) -> int:
    """Bytes that the forward pass keeps for the backward pass, with the CPU versions of the functions.

    With more than 32,768 tokens, fewer sequences are measured and the result is scaled: each needs about the same.
    """
    measured = min(sequences, max(1, 2**15 // length))
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    def forward_bytes() -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, tokens)
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        return sum(storage.nbytes() for key, storage in kept.items() if key not in weights)

    with FakeTensorMode():
        model = Decoder(config, seed=None, compute_dtype=dtype)
        tokens = torch.zeros(measured, length, dtype=torch.int64)
        everything = forward_bytes()
        model.activation_checkpointing = checkpointing
        inputs = forward_bytes()
    # With checkpointing only the layers' inputs are kept, and the backward pass recomputes one layer at a time.
    return (inputs + (everything - inputs) // config.num_hidden_layers) * sequences // measured


def format_bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
