"""The command line of generate.py: one dataclass, a sentence per field, checked before anything slow is imported.

Deliberately without torch: `python generate.py --help` answers at once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from errors import UserError
from generation.prompts import check_unicode


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits; the filters apply in the order of these fields."""

    repetition_penalty: float = 1.0
    """First: divide positive and multiply negative logits of tokens already in the prompt or the text (1: off)."""
    temperature: float = 0.8
    """Second: divide the logits; 0 takes the most likely token and ignores the filters below."""
    top_k: int = 0
    """Third: keep the k most likely tokens (0: all)."""
    top_p: float = 1.0
    """Fourth: keep the smallest set of most likely tokens that holds this much probability (1: all)."""
    min_p: float = 0.0
    """Fifth: keep tokens at least this times as likely as the most likely one (0: all)."""

    def __post_init__(self) -> None:
        # Written as `not ...` so that NaN fails too.
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature is {self.temperature} and must be 0 or more (0: the most likely token).")
        if self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k} and must be 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p} and must be above 0 and at most 1 (1: off).")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"--min-p is {self.min_p} and must lie between 0 (off) and 1.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"--repetition-penalty is {self.repetition_penalty} and must be above 0 (1: off).")


@dataclass(frozen=True)
class Settings:
    """Continue a text with a trained model: `generate.py runs/NAME --prompt "def " --max-new-tokens 100`.

    The text, prompt included, streams to standard output and nothing else does; the rest (which checkpoint, speed)
    goes to standard error. Several texts come one after another with a blank line between them. A text ends at the
    model's end-of-text token, a stop string, --max-new-tokens, or the end of the model's context.
    """

    run: Annotated[Path | None, tyro.conf.arg(metavar="[RUN]"), tyro.conf.Positional] = None
    """A run folder (runs/NAME: its best/ is used, else its last/) or a checkpoint directory (one with config.json and
    *.safetensors, such as a downloaded LLaMA or Qwen2 model). Without it: the newest run under runs/."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue (--prompt=TEXT if it begins with a dash); repeat the flag for several. Without any prompt
    standard input is read if it is not a terminal (all of it one prompt, less one final line break); if that is empty
    too, the model starts a text of its own."""
    prompt_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File with a prompt in each line that is not blank."""
    max_new_tokens: int = 200
    """Tokens to generate at most, for each text."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    seed: int = 1
    """Seed of the draws. Sample i of a prompt draws the same whatever stands beside it in the batch."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End the text before this string; repeat the flag for several."""
    samples: int = 1
    """Texts for each prompt."""
    batch_size: int = 16
    """Texts generated at once at most; more is faster in all and needs more memory."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a torch device such as cuda:1."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and activations. auto: bfloat16 on CUDA; on a CPU with bfloat16 instructions what the checkpoint
    is stored in; else float32."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Fused Triton kernels or plain PyTorch. auto: Triton on an NVIDIA or AMD GPU, where up to 8 texts at once decode
    by kernels made for few of them, one CUDA graph a step."""

    def __post_init__(self) -> None:
        for flag, value in {
            "--max-new-tokens": self.max_new_tokens,
            "--samples": self.samples,
            "--batch-size": self.batch_size,
        }.items():
            if value < 1:
                raise UserError(f"{flag} is {value} and must be at least 1.")
        for flag, texts in {"--prompt": self.prompt, "--stop": self.stop}.items():
            for text in texts:
                check_unicode(flag, text)
        if "" in self.stop:
            raise UserError("--stop is empty and would end every text at once; give the string to stop before.")
