"""From a model to a GGUF file. A model is written as the llama.cpp architecture that computes the same function: llama,
qwen3 or stablelm. Everything else is refused. Tensors are converted and written one at a time.
"""

import contextlib
import dataclasses
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LazyNumpyTensor
from torch import Tensor

from checkpoints.families import choose_model_type, zero_biases
from checkpoints.pretrained import Checkpoint, open_checkpoint
from contrib.llama_cpp_vocab import add_vocabulary
from data.tokenizer import Tokenizer
from errors import UserError, note
from files import writing
from generation.load import merge, open_model
from model.config import ModelConfig
from model.rope import frequencies

ARCHITECTURES = ("llama", "qwen3", "stablelm")  # model types that are architectures of llama.cpp under the same name
ROPE_TYPES = ("llama3", "linear")  # scalings of the rotary frequencies that a factor for each frequency expresses
# --dtype -> llama.cpp's name of it. Q8_0: 8 bits, with a float16 scale for each 32 weights of a row.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}


def write_gguf(directory: Path, out: Path, dtype: str = "auto", *, name: str = "") -> None:
    """Write the model of a directory, with its adapter merged, to the file `out`, completely or not at all.

    `dtype` is one of `DTYPES`; auto keeps that of the stored embedding. `name` is what llama.cpp shows. Raises
    `UserError` when `out` exists, and when llama.cpp cannot compute the same function.
    """
    if out.exists():
        raise UserError(f"{out} exists and is not overwritten; give another name, or delete it first.")
    checkpoint, tokenizer, ends = open_model(directory)
    config = checkpoint.config
    architecture = choose_architecture(config)
    if dtype == "auto":
        stored_dtype = str(checkpoint.dtype).removeprefix("torch.")
        dtype = stored_dtype if stored_dtype in DTYPES else "float32"
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out), tempfile.TemporaryDirectory(dir=out.parent) as folder:
        if checkpoint.adapter is not None:
            merge(directory, None, Path(folder, "merged"))
            checkpoint = open_checkpoint(Path(folder, "merged"))
        temporary = Path(folder, out.name)
        with contextlib.closing(GGUFWriter(temporary, architecture)) as writer:
            add_model(writer, config, name, dtype)
            add_vocabulary(writer, tokenizer, config.vocab_size)
            add_special_tokens(writer, tokenizer, ends, config.vocab_size)
            add_tensors(writer, gguf_tensors(checkpoint, architecture), dtype)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file(progress=sys.stderr.isatty())
        temporary.replace(out)


def choose_architecture(config: ModelConfig) -> str:
    """The architecture of llama.cpp that computes the same function; `UserError` if there is none."""
    architecture = choose_model_type(config)
    if architecture not in ARCHITECTURES:
        fields = ("norm", "norm_bias", "norm_placement", "mlp", "qk_norm", "head_dim", "attention_output_bias")
        usual = ModelConfig()
        unusual = [name for name in fields if name == "norm" or getattr(config, name) != getattr(usual, name)]
        model = ", ".join(f"{name} = {getattr(config, name)}" for name in unusual)
        raise UserError(f"llama.cpp has no architecture for a model with {model}; it has {', '.join(ARCHITECTURES)}.")
    if architecture == "qwen3" and config.attention_output_bias:
        raise UserError("llama.cpp's qwen3 has no bias of the attention output: this model cannot be written.")
    scaling = config.rope_scaling
    if scaling is not None and (architecture != "llama" or scaling["rope_type"] not in ROPE_TYPES):
        scaled = f"the rotary frequencies of this model are scaled ({architecture}, {scaling['rope_type']})"
        raise UserError(f"{scaled}, and only those of llama with {' or '.join(ROPE_TYPES)} can be written.")
    return architecture


def gguf_tensors(checkpoint: Checkpoint, architecture: str) -> dict[str, Tensor]:
    """The tensors of the file under llama.cpp's names; a matrix that is only copied stays in the mapped weight file."""
    config = checkpoint.config
    tensors = {name: stored.read() for name, stored in checkpoint.tensors.items()}
    if architecture == "llama":  # pairs that rotate together are rows 2i and 2i + 1 of a head; elsewhere i and i + d/2
        for name, tensor in tensors.items():
            if ".q_proj." in name or ".k_proj." in name:
                pairs = tensor.unflatten(0, (-1, 2, config.resolved_head_dim // 2))
                tensors[name] = pairs.transpose(1, 2).reshape(tensor.shape)
    if architecture == "stablelm":  # it has no tied head, and every norm has a bias
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        for name in zero_biases(config):
            tensors[name] = torch.zeros(config.hidden_size)
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    renamed = {name_map.get_name(name, (".weight", ".bias")): tensor for name, tensor in tensors.items()}
    if config.rope_scaling is not None:
        unscaled = frequencies(dataclasses.replace(config, rope_scaling=None))
        renamed["rope_freqs.weight"] = unscaled / frequencies(config)  # llama.cpp divides the frequencies by them
    return renamed


def add_tensors(writer: GGUFWriter, tensors: dict[str, Tensor], dtype: str) -> None:
    """Add the tensors, matrices in `dtype` and others in float32; each is converted when it is written."""
    for name, tensor in tensors.items():
        tensor_dtype = dtype if tensor.ndim > 1 else "float32"
        kind = GGMLQuantizationType[DTYPES[tensor_dtype]]
        block_size, _ = gguf.GGML_QUANT_SIZES[kind]
        if tensor.shape[-1] % block_size:
            raise UserError(f"{name} has rows that --dtype {dtype} cannot divide by {block_size}; leave out --dtype.")
        if not tensor.to(getattr(torch, tensor_dtype, torch.float32)).isfinite().all():
            problem = f"{name} has values that {tensor_dtype} cannot hold (up to {tensor.float().abs().max():.3g})"
            fix = "use --dtype bfloat16 or float32, or another checkpoint if they are not finite"
            raise UserError(f"{problem}; {fix}.")
        shape = LazyNumpyTensor.meta_with_dtype_and_shape(np.float32, tensor.shape)
        values = LazyNumpyTensor(meta=shape, args=(tensor,), func=lambda stored: stored.float().numpy())
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def add_model(writer: GGUFWriter, config: ModelConfig, name: str, dtype: str) -> None:
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "float32" else f"MOSTLY_{DTYPES[dtype]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.resolved_head_dim)
    writer.add_value_length(config.resolved_head_dim)
    writer.add_rope_dimension_count(config.resolved_head_dim)
    writer.add_rope_freq_base(float(config.rope_theta))
    if config.norm == "rms":
        writer.add_layer_norm_rms_eps(float(config.norm_eps))
    else:
        writer.add_layer_norm_eps(float(config.norm_eps))
        writer.add_parallel_residual(False)


def add_special_tokens(writer: GGUFWriter, tokenizer: Tokenizer, ends: frozenset[int], vocab_size: int) -> None:
    """BOS, which is added in front of a text where it was in training, EOS, and the chat template."""
    writer.add_add_bos_token(tokenizer.bos_id is not None)
    writer.add_add_eos_token(False)
    # Without BOS, EOS stands between documents; llama.cpp would take some other id for BOS if none were given.
    writer.add_bos_token_id(tokenizer.document_start)
    writer.add_eos_token_id(tokenizer.eos_id)
    other_ends = sorted(token for token in ends - {tokenizer.eos_id} if 0 <= token < vocab_size)
    if other_ends:
        writer.add_eot_token_id(other_ends[0])
    if len(other_ends) > 1:
        note(f"llama.cpp has a place for one more end token, {other_ends[0]}; {other_ends[1:]} are left out")
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
