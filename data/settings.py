"""The settings of the text that a run trains on. Imports neither torch nor numpy, so that `--help` answers at once."""

from dataclasses import dataclass
from typing import Annotated

from flags import Fraction, NonNegativeInt, OptionalInt, PositiveInt, check_fields, optional

TEXT_SETTINGS = ("data", "text_field", "validation_fraction", "validation_salt")  # which text, and what is held out


@dataclass(frozen=True)
class DataSettings:
    """The text and how it becomes batches."""

    data: tuple[str, ...] = ("python",)
    """Files, folders or globs of .txt .md .py .jsonl .jsonl.gz .parquet; hub:OWNER/NAME[/FOLDER], a data set of the
    Hugging Face Hub; or python (the standard library of this interpreter), python-chat (questions and answers about
    it), shakespeare, tinystories (these two are downloaded)."""
    text_field: str = "text"  # Field of jsonl and parquet rows with the text; messages: those of conversations.
    tokenizer: Annotated[str | None, optional("FILE")] = None  # A tokenizer or its folder. Default: made of the text.
    validation_fraction: Fraction = 0.05  # Part of the text, in complete documents, that is held out (at most 8 MB).
    validation_salt: NonNegativeInt = 0  # Another number holds out other documents, to choose settings.
    cache: str = ".cache"  # Folder where trained tokenizers and tokenized texts are cached.
    sequence_length: PositiveInt = 256  # Tokens per sequence.
    first_sequence_length: OptionalInt = None
    """Tokens per sequence at first, then twice as many in equal parts of the first 40% of the steps until it is
    --sequence-length; giving that one overrides what the TOML file sets here. None: all steps have the same."""
    document_mask: bool = False  # Attention sees the token's own document alone, as it always does in conversations.
    batch_size: PositiveInt = 16  # Sequences per optimizer step, over all processes and micro-batches.
    micro_batch_size: OptionalInt = None  # Sequences that go through the model at once: less memory. Default: all.

    __post_init__ = check_fields

    def micro_batch(self, processes: int = 1) -> int:
        """Sequences of --sequence-length that go through the model at once, in each of so many processes."""
        share = self.batch_size // processes
        return min(self.micro_batch_size or share, share)
