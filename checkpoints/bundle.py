"""A model, its LoRA adapter and its tokenizer: opened together, and written as one checkpoint."""

from pathlib import Path

from checkpoints.find import eos_ids, find_adapter, generation_config
from checkpoints.pretrained import Checkpoint, load_pretrained, open_checkpoint, save_pretrained, write_json
from data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from errors import UserError
from files import read_json


def open_model(directory: Path, adapter: str | None = None) -> tuple[Checkpoint, Tokenizer, frozenset[int]]:
    """A checkpoint whose weights are not read yet, its tokenizer, and the ids that end a text."""
    model, found = find_adapter(directory, adapter)
    checkpoint = open_checkpoint(model, found)
    tokenizer = load_tokenizer(found if found is not None and [*found.glob("tokenizer.*")] else model)
    check_vocabulary(tokenizer, checkpoint.config.vocab_size)
    return checkpoint, tokenizer, eos_ids(model, tokenizer.eos_id, found)


def merge(checkpoint: Checkpoint, tokenizer: Tokenizer, ends: frozenset[int], new: Path) -> None:
    """Write a model with its adapter added, in the dtypes of its files, as the directory `new`."""
    if new.exists():
        raise UserError(f"--merge {new} exists; give a new directory.")
    decoder, unfinished = load_pretrained(checkpoint), new.with_name(f"{new.name}.new")
    save_pretrained(decoder, unfinished, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    tokenizer.save(unfinished)
    fields = read_json(generation_config(checkpoint.directory, checkpoint.adapter))
    fields["eos_token_id"] = [tokenizer.eos_id, *sorted(ends - {tokenizer.eos_id})]
    write_json(unfinished / "generation_config.json", fields)
    unfinished.rename(new)
