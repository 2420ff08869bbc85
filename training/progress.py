"""What a run prints: the progress bar, text samples, and the summary at its end."""

import math
import shlex
import statistics
import time

from tqdm import tqdm

from generation.generate import complete
from generation.prompts import encode_prompt
from generation.terminal import printable
from model.count import flops_per_token
from model.device import peak_flops
from training import plot
from training.session import Session, StepResult

FINAL_SAMPLE_TOKENS = 200
SECONDS_PER_PICTURE = 10  # a picture takes a tenth of a second, the first one half a second more
SECONDS_PER_LINE = 10


def progress_bar(session: Session) -> tqdm:
    """The bar of steps, shown by the main process in a terminal."""
    hidden = None if session.processes.is_main else True  # None: hidden where standard error is no terminal
    return tqdm(total=session.steps, initial=session.state.step, unit="step", disable=hidden, dynamic_ncols=True)


def show_step(session: Session, bar: tqdm, result: StepResult) -> None:
    """Advance the bar, or print a line every ten seconds and 10% of the steps where there is none.

    Both have the loss, tokens per second, and the share of the device's peak FLOP/s (MFU) where that is known.
    """
    if math.isinf(result.gradient_norm):
        scale = session.scaler.get_scale()
        bar.write(f"step {result.step}: float16 overflow, update skipped; loss scale {scale:g}")
    data, steps = session.settings.data, session.steps
    speed = data.batch_size * data.sequence_length / statistics.median(session.recent_seconds)
    shown = {"loss": f"{result.loss:.3f}", "tok/s": f"{speed:,.0f}"}
    peak = peak_flops(session.device, session.dtype)
    if peak is not None:
        flops = flops_per_token(session.settings.model, data.sequence_length)
        shown["MFU"] = f"{speed * flops / (peak * session.processes.count):.1%}"
    bar.set_postfix(shown, refresh=result.step == 1)
    bar.update()
    now = time.monotonic()
    if bar.disable and (result.step % max(1, steps // 10) == 0 or now - session.printed_at >= SECONDS_PER_LINE):
        session.printed_at = now
        line = ", ".join(f"{name} {value}" for name, value in shown.items())
        print(f"step {result.step} of {steps}: {line}", flush=True)


def sample(session: Session, length: int, prompt: str) -> str:
    """The prompt and what the current weights continue it with; the same seed and step give the same text."""
    session.model.eval()
    text = complete(
        session.model,
        session.corpus.tokenizer,
        prompt,
        max_new_tokens=min(length, session.settings.model.max_position_embeddings - 1),
        seed=session.settings.run.seed + session.state.step,
    )
    session.model.train()
    return "  | " + printable(text).replace("\n", "\n  | ")


def report_end(session: Session) -> None:
    """Print how the run ended, a last sample, and the command to type next."""
    state, corpus, run_dir = session.state, session.corpus, shlex.quote(str(session.run_dir))
    if state.step < session.steps:
        resume = f"python train.py --resume {run_dir}"
        print(f"stopped and saved at step {state.step} of {session.steps}; resume with: {resume}")
        return
    prompt = session.settings.run.sample_prompt or first_words(session)
    print(f"\n{sample(session, FINAL_SAMPLE_TOKENS, prompt)}\n")
    print(f"validation: {session.evaluation}")
    print(f"xz -9e on the same text: {corpus.xz_bits_per_byte:.4f} bits per byte; hash {corpus.text_hash}")
    speed = state.tokens / state.seconds
    print(f"{state.step:,} steps, {state.tokens:,} tokens in {state.seconds:.0f} s of training, {speed:,.0f} tokens/s")
    if state.best_validation_loss < session.evaluation.loss:
        print(f"best/ has the weights of an earlier step, with {state.best_validation_loss:.4f} nats per token")
    print(f"next: python generate.py {run_dir} --prompt {shlex.quote(prompt)}")


def first_words(session: Session) -> str:
    """An example of a prompt: the first words of a line of the training text; none in a tiny context."""
    lines = session.corpus.tokenizer.decode(session.corpus.train[:1000].tolist()).splitlines()
    lines = [line for line in lines if line[:1].isalpha()] or [line for line in lines if line.strip()]
    words = printable(" ".join(lines[0].split()[:3])) if lines else ""
    fits = len(encode_prompt(session.corpus.tokenizer, words)) < session.settings.model.max_position_embeddings
    return words if fits else ""


def draw_losses(session: Session, bar: tqdm) -> None:
    """Draw loss.png: after the last step, and before that at most every ten seconds; a failure is only a note."""
    now = time.monotonic()
    if now - session.drawn_at < SECONDS_PER_PICTURE and session.state.step < session.steps:
        return
    session.drawn_at = now
    try:
        plot.draw([session.run_dir], session.run_dir / "loss.png")
    except Exception as error:  # matplotlib raises errors of many types, also when it is imported
        bar.write(f"note: loss.png cannot be drawn ({error!r:.200})")
