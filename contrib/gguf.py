"""Write a model as one GGUF file for llama.cpp: `python -m contrib.gguf RUN OUT.gguf`. See `--help`.

A model is written as the llama.cpp architecture that computes the same function: llama, qwen3 or stablelm. Everything
else is refused. Tensors are read, converted and written one at a time.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__":  # installs the error handler, then imports itself: it handles the slow imports, too
    from errors import exit_on_user_error

    with exit_on_user_error():
        from contrib.gguf import main
        from flags import call_with_flags

        sys.exit(call_with_flags(main, prog="python -m contrib.gguf"))

import gguf
import numpy as np
import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from checkpoints.families import choose_model_type, zero_biases
from checkpoints.find import eos_ids, find_checkpoint
from checkpoints.pretrained import Checkpoint, open_checkpoint
from contrib.llama_cpp_vocab import add_vocabulary
from data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from errors import UserError, note, printable
from files import writing
from model.config import ModelConfig
from model.rope import frequencies

ARCHITECTURES = ("llama", "qwen3", "stablelm")  # model types that are architectures of llama.cpp under the same name
DISTINCTIVE = ("norm", "norm_bias", "norm_placement", "mlp", "qk_norm", "head_dim", "attention_output_bias")
ROPE_TYPES = ("llama3", "linear")  # scalings of the rotary frequencies that a factor for each frequency expresses
# --dtype -> llama.cpp's name of it. Q8_0: 8 bits, with a float16 scale for each 32 weights of a row.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}


def main(
    run: Annotated[str, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.arg(metavar="OUT.gguf"), tyro.conf.Positional],
    dtype: Literal["auto", *DTYPES] = "auto",
) -> None:
    """Write a trained model with its tokenizer as one GGUF file: llama-cli -m OUT.gguf

    Models with RMSNorm are written as llama (qwen3 with --qk-norm), those with LayerNorm as stablelm; llama.cpp has no
    architecture for the other norms, placements and MLPs. For fewer than 8 bits, quantize the file with llama-quantize.

    Whether other programs read the same model from the file: python -m contrib.same RUN --with OUT.gguf

    Args:
        run: A run folder or a checkpoint, as for generate.py.
        out: The file to write; an existing file is kept.
        dtype: Dtype of the matrices; auto: as stored. Norms and biases are always float32.
    """
    write_gguf(find_checkpoint(run), out, dtype, name=Path(os.path.abspath(run)).name)
    print(printable(f"written: {out}"))


def write_gguf(checkpoint: Path, out: Path, dtype: str = "auto", *, name: str = "") -> None:
    """Write the model of a checkpoint's directory to the file `out`, completely or not at all.

    `dtype` is one of `DTYPES`; auto keeps that of the stored embedding. `name` is what llama.cpp shows. Raises
    `UserError` when `out` exists, and when llama.cpp cannot compute the same function.
    """
    if out.exists():
        raise UserError(f"{out} exists and is not overwritten; give another name, or delete it first.")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with writing(out):
            convert(checkpoint, temporary, dtype, name)
            temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def convert(checkpoint: Path, path: Path, dtype: str, name: str) -> None:
    """Write the file `path` itself; after an error it is incomplete."""
    opened = open_checkpoint(checkpoint)
    config, architecture = opened.config, choose_architecture(opened.config)
    tokenizer = load_tokenizer(checkpoint)
    check_vocabulary(tokenizer, config.vocab_size)
    if dtype == "auto":
        stored_dtype = str(opened.common_dtype(["model.embed_tokens.weight"])).removeprefix("torch.")
        dtype = stored_dtype if stored_dtype in DTYPES else "float32"
    tensors = gguf_tensors(opened, architecture)
    writer = gguf.GGUFWriter(path, architecture)
    try:
        add_model(writer, config, name, dtype)
        add_vocabulary(writer, tokenizer, config.vocab_size)
        add_special_tokens(writer, checkpoint, tokenizer, config.vocab_size)
        for target, tensor in tensors.items():
            kind = gguf.GGMLQuantizationType[DTYPES[dtype] if len(tensor.shape) > 1 else "F32"]
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if tensor.shape[-1] % per_block:
                raise UserError(f"{target} has rows that --dtype {dtype} cannot divide by {per_block}; use bfloat16.")
            size = math.prod(tensor.shape) // per_block * block_bytes
            writer.add_tensor_info(target, tensor.shape, None, size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for target, tensor in tqdm(tensors.items(), unit="tensor", desc="writing", disable=None):
            writer.write_tensor_data(to_array(tensor, dtype, target))
    finally:
        writer.close()


def choose_architecture(config: ModelConfig) -> str:
    """The architecture of llama.cpp that computes the same function; `UserError` if there is none."""
    architecture = choose_model_type(config)
    if architecture not in ARCHITECTURES:
        model = ", ".join(f"{name} = {getattr(config, name)}" for name in DISTINCTIVE)
        raise UserError(f"llama.cpp has no architecture for a model with {model}; it has {', '.join(ARCHITECTURES)}.")
    if architecture == "qwen3" and config.attention_output_bias:
        raise UserError("llama.cpp's qwen3 has no bias of the attention output: this model cannot be written.")
    scaling = config.rope_scaling
    if scaling is not None and (architecture != "llama" or scaling["rope_type"] not in ROPE_TYPES):
        raise UserError(
            f"the rotary frequencies of this model are scaled ({architecture}, {scaling['rope_type']}), "
            f"and only those of llama with {' or '.join(ROPE_TYPES)} can be written."
        )
    return architecture


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor of the GGUF file: its shape, and how to read or make it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def gguf_tensors(checkpoint: Checkpoint, architecture: str) -> dict[str, Source]:
    """The tensors of the file under llama.cpp's names, from those of a checkpoint."""
    config = checkpoint.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    sources = dict(checkpoint.tensors)
    if architecture == "llama":
        for projection, heads in {"q": config.num_attention_heads, "k": config.num_key_value_heads}.items():
            for name in [name for name in sources if f".{projection}_proj." in name]:
                sources[name] = interleave(sources[name], heads)
    if architecture == "stablelm":  # it has no tied head, and every norm has a bias
        if config.tie_word_embeddings:
            sources["lm_head.weight"] = sources["model.embed_tokens.weight"]
        for name in zero_biases(config):
            sources[name] = Source((config.hidden_size,), lambda: torch.zeros(config.hidden_size))
    tensors = {names.get_name(name, (".weight", ".bias")): source for name, source in sources.items()}
    if config.rope_scaling is not None:
        plain = frequencies(dataclasses.replace(config, rope_scaling=None))
        factors = (plain / frequencies(config)).float()  # llama.cpp divides the frequencies by them
        tensors["rope_freqs.weight"] = Source(tuple(factors.shape), lambda: factors)
    return tensors


def interleave(source: Source, heads: int) -> Source:
    """Rows of q or k in the order of llama.cpp's llama: pairs that rotate together are rows 2i and 2i + 1 of a head.

    Here, and in its other architectures, they are rows i and i + d/2.
    """
    shape = source.shape
    return Source(shape, lambda: source.read().unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(shape))


def to_array(source: Source, dtype: str, name: str) -> np.ndarray:
    """A tensor as it is written: matrices in `dtype`, others in float32. NumPy has no bfloat16: it gets the bits."""
    tensor = source.read()
    converted = tensor.to(torch.float32 if tensor.ndim < 2 or dtype == "q8_0" else getattr(torch, dtype))
    if not converted.isfinite().all():
        raise UserError(
            f"{name} has values that {dtype} cannot hold (up to {tensor.float().abs().max():.3g}); "
            f"use --dtype bfloat16 or float32, or another checkpoint if they are not finite."
        )
    if dtype == "q8_0" and tensor.ndim > 1:
        return gguf.quants.quantize(converted.numpy(), gguf.GGMLQuantizationType.Q8_0)
    return (converted.view(torch.int16) if converted.dtype == torch.bfloat16 else converted).contiguous().numpy()


def add_model(writer: gguf.GGUFWriter, config: ModelConfig, name: str, dtype: str) -> None:
    """Describe the model's shape, in llama.cpp's keys."""
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


def add_special_tokens(writer: gguf.GGUFWriter, checkpoint: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """BOS, which is added in front of a text where it was in training, EOS, and the chat template."""
    writer.add_add_bos_token(tokenizer.bos_id is not None)
    writer.add_add_eos_token(False)
    # Without BOS, EOS stands between documents; llama.cpp would take some other id for BOS if none were given.
    writer.add_bos_token_id(tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    ends = sorted(eos_ids(checkpoint, tokenizer.eos_id) - {tokenizer.eos_id})
    ends = [token for token in ends if 0 <= token < vocab_size]
    if ends:
        writer.add_eot_token_id(ends[0])
    if len(ends) > 1:
        note(f"llama.cpp has a place for one more end token, {ends[0]}; {ends[1:]} are left out")
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
