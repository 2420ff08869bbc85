"""From the directory of a model to what generates: its tokenizer, and its decoder in a dtype for inference."""

import operator
import tempfile
from pathlib import Path

import torch

import kernels
from checkpoints.find import ModelFiles, find_checkpoint, find_files
from checkpoints.pretrained import Checkpoint, load_pretrained, open_checkpoint, save_pretrained, write_json
from data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from errors import UserError, reading
from files import read_json
from generation.steps import MAX_CPU_SEQUENCES, decode_step_kind, quantize_matrices
from model.decoder import Decoder
from model.device import choose_device, choose_dtype, explain_out_of_memory


def open_model(
    run: Path | str, adapter: str | None = None, tokenizer: Tokenizer | None = None
) -> tuple[Checkpoint, Tokenizer, frozenset[int]]:
    """A checkpoint whose weights are not read yet, its tokenizer (as given, if it is), and the ids that end a text."""
    files = find_files(find_checkpoint(run), adapter)
    checkpoint = open_checkpoint(*files)
    tokenizer = tokenizer or load_tokenizer(files.tokenizer)
    check_vocabulary(tokenizer, checkpoint.config.vocab_size)
    return checkpoint, tokenizer, find_eos_ids(files, tokenizer.eos_id)


def find_eos_ids(files: ModelFiles, tokenizer_eos: int) -> frozenset[int]:
    """All ids that end a text: the tokenizer's EOS, and those (of chat models several) that the model's files list."""
    for path in (files.generation_config, files.model / "config.json"):
        with reading(path):
            eos = read_json(path).get("eos_token_id")  # a number, a list or null
            if eos is not None:
                listed = eos if isinstance(eos, list) else [eos]
                return frozenset(map(operator.index, [tokenizer_eos, *listed]))
    return frozenset([tokenizer_eos])


def load_decoder(
    checkpoint: Checkpoint, device: str, dtype: str, implementation: str = "auto", batch_size: int = MAX_CPU_SEQUENCES
) -> Decoder:
    """The model on its device, with its weights in the dtype it computes in; arguments are as generate.py's flags."""
    int8 = dtype == "int8"
    place = choose_device(device)
    kernels.use(implementation, place)
    if int8 and decode_step_kind(checkpoint.config, place, torch.bfloat16, batch_size) != "cpu":
        raise UserError(
            f"--dtype int8 needs a CPU, Numba, at most {MAX_CPU_SEQUENCES} sequences at once (--batch-size), "
            "and a pre-norm model with RMSNorm or LayerNorm and SwiGLU; use bfloat16."
        )
    compute_dtype = choose_dtype("bfloat16" if int8 else dtype, place, checkpoint.dtype)
    decoder = load_pretrained(checkpoint, device=place, compute_dtype=compute_dtype, cast=True).eval()
    if int8:
        quantize_matrices(decoder)
    return decoder


@explain_out_of_memory("out of memory; merge on a machine that has more.")
def merge(directory: Path, adapter: str | None, new: Path) -> None:
    """Write a model with its adapter added, in the dtypes of its files, as the directory `new`."""
    checkpoint, tokenizer, eos_ids = open_model(directory, adapter)
    if new.exists():
        raise UserError(f"--merge {new} exists; give a new directory.")
    if checkpoint.adapter is None:
        raise UserError(f"--merge: {checkpoint.directory} is no adapter, and --adapter names none; nothing to merge.")
    decoder = load_pretrained(checkpoint)
    fields = read_json(ModelFiles(checkpoint.directory, checkpoint.adapter).generation_config)
    fields["eos_token_id"] = [tokenizer.eos_id, *sorted(eos_ids - {tokenizer.eos_id})]
    new.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=new.parent) as folder:
        unfinished = Path(folder, new.name)
        save_pretrained(decoder, unfinished, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
        tokenizer.save(unfinished)
        write_json(unfinished / "generation_config.json", fields)
        unfinished.rename(new)
