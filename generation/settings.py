"""What generate.py is asked: its flags (fields, whose docstrings are the help) and prompts. Imports no torch."""

import codecs
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro
from msgspec import Meta

from checkpoints.find import find_files
from errors import UserError, counted, log, note, reading
from files import read_json
from flags import Fraction, NonNegativeFloat, check_fields, optional

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
TEXT_TOKENS, CHAT_TOKENS = 200, 2048  # of a text and of an answer, at most, unless the user says how many


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled, in steps in this order. What the model's generation_config.json says of it comes
    before these defaults."""

    repetition_penalty: Annotated[float, Meta(ge=0.01, lt=1e9)] = 1.0
    """Above 1, tokens of the prompt and of the text so far become less likely (1: off)."""
    temperature: NonNegativeFloat = 0.8
    """Divides the logits: below 1 the text is more predictable, above 1 more random. 0: the most likely token."""
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """Sample from the k most likely tokens only (0, or -1 as in vLLM: all)."""
    top_p: Fraction = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities sum to at least this (1: all)."""
    min_p: Fraction = 0.0
    """Sample from tokens whose probability is at least this fraction of the most likely token's (0: all)."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "top_k", max(self.top_k, 0))


# Fields of generation_config.json that change what transformers generates, unless missing or equal to this value.
UNSUPPORTED = {
    "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "num_beams": 1, "penalty_alpha": 0, "min_length": 0,
    "min_new_tokens": 0, "no_repeat_ngram_size": 0, "guidance_scale": 1, "suppress_tokens": [], "sequence_bias": [],
    "begin_suppress_tokens": [], "bad_words_ids": [], "stop_strings": [], "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Continue a text with a trained model, or talk with one that was trained for conversations.

    Continue a text: generate.py runs/NAME "def "

    Hold a conversation: generate.py ~/Qwen2.5-0.5B-Instruct --chat

    Answer one message: echo "Why is the sky blue?" | generate.py ~/Qwen2.5-0.5B-Instruct --chat > answer.txt

    The text, prompt included, or in a chat the answer alone, is printed to standard output as it is generated. It ends
    at the model's end-of-text token, before a stop string, after --max-new-tokens, or when its context is full.
    """

    run: Annotated[str | None, optional("[RUN]"), tyro.conf.Positional] = None
    """A run directory (runs/NAME: uses its best/ if there is one, else its last/), a checkpoint directory with
    config.json and *.safetensors, or a model on the Hugging Face Hub (org/name or org/name@revision), which is
    downloaded once. Default: the newest run in runs/."""
    adapter: Annotated[str | None, optional("ADAPTER")] = None
    """A LoRA adapter of RUN, as PEFT writes it, or the run that trained it. RUN may also be an adapter itself."""
    merge: Annotated[Path | None, optional("NEW")] = None
    """Do not generate; write RUN and its adapter as one model, the new directory NEW. Whether other programs read the
    same model from it: python -m contrib.same NEW"""
    text: Annotated[tuple[str, ...], optional("[TEXT]"), tyro.conf.Positional] = ()
    """Text to continue, or with --chat the message to answer. Default: standard input, minus one final line break; if
    that is a terminal or empty, the model starts a text of its own."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """More texts like TEXT (--prompt=TEXT if it starts with a dash). Repeat the flag for several."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """Answer messages as the model's own chat template has them, in a terminal without a prompt as a conversation.
    When that is longer than the model's context, the oldest turns are dropped."""
    system: Annotated[str | None, optional("TEXT")] = None
    """System prompt of a chat: who the model is and how it answers. Default: what the chat template says."""
    max_new_tokens: Annotated[int | None, optional("INT")] = None
    """Maximum number of tokens to generate per text. Default: 200, in a chat 2048."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = field(default_factory=Sampling)
    jsonl: bool = False
    """Read prompts from standard input, in each line a JSON text or an object with "prompt" or, for a chat, "messages";
    write an object a line as texts end, whose "row" is the number of the prompt, from 0 (empty lines do not count)."""
    seed: int = 1
    """Random seed. Sample i of a prompt is the same whatever else is in its batch, up to rounding."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End a text before this string. Repeat the flag for several strings."""
    samples: int = 1
    """Number of texts to generate per prompt."""
    batch_size: int = 16
    """Maximum number of texts generated in parallel. Larger batches are faster overall and need more memory."""
    device: str = "auto"
    """auto (CUDA if available, else MPS, else CPU), or a torch device such as cuda:1."""
    dtype: Dtype = "auto"
    """Dtype of weights and activations. auto: bfloat16 on CUDA (float16 where that is faster); bfloat16 for a bfloat16
    checkpoint on a CPU with bfloat16 instructions; else float32. int8, on a CPU: bfloat16, but new tokens are computed
    with 8-bit matrices, which is faster for few texts at once and takes 3 bytes per parameter."""
    drafts: bool = True
    """At temperature 0, compute a single text on a CPU faster where it repeats itself. The text is the same."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Fused Triton kernels or plain PyTorch. auto: Triton on an NVIDIA or AMD GPU."""

    def __post_init__(self) -> None:
        if min(self.token_limit, self.samples, self.batch_size) < 1:
            raise UserError("--max-new-tokens, --samples and --batch-size must be at least 1.")
        if "" in self.stop:
            raise UserError("--stop needs a text; an empty one would end every answer at once.")
        if len(self.text) > 1 and any(" " in text for text in self.text):  # they were in quotes
            raise UserError("for several texts repeat --prompt TEXT.")
        if len(self.text) > 1:
            raise UserError(f"put a text of several words in quotes: {shlex.quote(' '.join(self.text))}")
        if self.system is not None and not self.chat:
            raise UserError("--system is for conversations; give --chat too.")

    @property
    def token_limit(self) -> int:
        default = CHAT_TOKENS if self.chat else TEXT_TOKENS
        return default if self.max_new_tokens is None else self.max_new_tokens


def small_model_sampling(*, chat: bool) -> Sampling:
    """The sampling that is saved with a model trained here. Of 40 texts of the default run none loops; with a penalty
    of 1.15 nine do. Answers get none: it misspells what was learned by heart."""
    return Sampling(repetition_penalty=1.0 if chat else 1.2, temperature=0.7, min_p=0.05)


def recommended_sampling(directory: Path, adapter: str | None = None, chat: bool = True) -> Sampling | None:
    """The sampling that generation_config.json recommends, as transformers reads it, or None.

    A greedy one is for chats alone: a text would repeat itself.
    """
    path = find_files(directory, adapter).generation_config
    fields = {key: value for key, value in read_json(path).items() if value is not None}
    unsupported = [key for key, neutral in UNSUPPORTED.items() if fields.get(key, neutral) != neutral]
    if unsupported:
        note(f"{path} has {', '.join(unsupported)}, without effect here")
    values = {name: fields[name] for name in vars(Sampling()) if name in fields}
    if not values and "do_sample" not in fields:
        return None
    if fields.get("do_sample") is not True:
        values = {"temperature": 0, "repetition_penalty": values.get("repetition_penalty", 1)}
    else:
        values = {"temperature": 1.0, "top_k": 50} | values
    try:
        sampling = Sampling(**values)
    except UserError as error:
        raise UserError(f"{path} cannot be read ({str(error).rstrip('.')}); correct or delete it.") from None
    return sampling if chat or sampling.temperature > 0 else None


def read_prompts(settings: Settings) -> list[str | list[dict]] | None:
    """The prompts of the command line, else those on standard input, of which some may be the messages of a
    conversation; None for a conversation in a terminal.
    """
    prompts = [*settings.text, *settings.prompt]
    if prompts and settings.jsonl and os.path.isfile(prompts[0]):  # a path of any length
        raise UserError(f"--jsonl reads standard input: python generate.py RUN --jsonl < {prompts[0]}")
    if prompts:
        return prompts
    if settings.jsonl:
        lines = enumerate(sys.stdin.buffer, 1)
        rows = [read_json_prompt(line, number) for number, line in lines if line.strip()]
        log(f"standard input has {counted(len(rows), 'prompt')}")
        return rows
    if not sys.stdin.isatty():
        what = "one message, of all lines," if settings.chat else "the prompt"
        log(f"reading {what} from standard input")  # if nobody writes to that pipe, the program seems to hang
        with reading("standard input", "convert it to UTF-8"):
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        return [text.replace("\r\n", "\n").removesuffix("\n")]  # the line break that `echo` and editors append
    if settings.chat and settings.samples > 1:
        raise UserError("a conversation has one answer to each message; give --samples with messages after the run.")
    if settings.chat:
        return None
    log("no prompt: the model starts a text of its own; give one after the run, or talk with a chat model with --chat")
    return [""]


def read_json_prompt(line: bytes, number: int) -> str | list[dict]:
    """The prompt of a line of JSON, or the messages of a conversation."""
    fix = 'give a JSON text, or an object with "prompt" or "messages", in each line'
    with reading(f"line {number} of standard input", fix):
        row = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=str | dict)
        fields = {"prompt": row} if isinstance(row, str) else row
        name = "messages" if "messages" in fields else "prompt"
        if len(fields) > 1:
            note(f'standard input: only "{name}" is read of {", ".join(fields)}; sampling is set by flags')
        return msgspec.convert(fields[name], list[dict] if name == "messages" else str)
