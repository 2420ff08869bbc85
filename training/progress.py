"""What a run prints: the progress bar, text samples, and the summary at its end."""

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
from training.session import Session

FINAL_SAMPLE_TOKENS = 200
SECONDS_PER_PICTURE = 10  # a picture takes a tenth of a second, the first one half a second more


def progress_bar(session: Session) -> tqdm:
    """The bar of steps, shown by the main process only."""
    state, hidden = session.state, not session.processes.is_main
    return tqdm(total=session.steps, initial=state.step, unit="step", disable=hidden, dynamic_ncols=True)


def show_step(session: Session, bar: tqdm, loss: float) -> None:
    """Advance the bar: loss, tokens per second, and the share of the device's peak FLOP/s (MFU) where it is known."""
    if session.skipped_updates:
        scale = session.scaler.get_scale()
        bar.write(f"step {session.state.step}: float16 overflow, update skipped; loss scale {scale:g}")
    settings = session.settings
    tokens = settings.data.batch_size * settings.data.sequence_length
    speed = tokens / statistics.median(session.recent_seconds)
    shown = {"loss": f"{loss:.3f}", "tok/s": f"{speed:,.0f}"}
    peak = peak_flops(session.device, session.dtype)
    if peak is not None:
        flops = flops_per_token(settings.model, settings.data.sequence_length)
        shown["MFU"] = f"{speed * flops / (peak * session.processes.count):.1%}"
    bar.set_postfix(shown, refresh=session.state.step == 1)
    bar.update()


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
        print(
            f"stopped and saved at step {state.step} of {session.steps}; "
            f"resume with: python train.py --resume {run_dir}"
        )
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
    """An example of a prompt: the first three words of a line near the start of the text that was trained on.

    Empty if that does not fit into the model's context.
    """
    lines = session.corpus.tokenizer.decode(session.corpus.train[:1000].tolist()).splitlines()
    lines = [line for line in lines if line[:1].isalpha()] or [line for line in lines if line.strip()]
    words = printable(" ".join(lines[0].split()[:3])) if lines else ""
    fits = len(encode_prompt(session.corpus.tokenizer, words)) < session.settings.model.max_position_embeddings
    return words if fits else ""


def draw_losses(session: Session, bar: tqdm) -> None:
    """Draw loss.png: after the last step, and before that at most once in SECONDS_PER_PICTURE.

    A stopped run keeps the last one. A run does not end because a picture, or matplotlib itself, fails: that is a note.
    """
    now = time.monotonic()
    if now - session.drawn_at < SECONDS_PER_PICTURE and session.state.step < session.steps:
        return
    session.drawn_at = now
    try:
        plot.draw([session.run_dir], session.run_dir / "loss.png")
    except Exception as error:  # matplotlib raises errors of many types, also when it is imported
        bar.write(f"note: loss.png cannot be drawn ({error!r:.200})")
