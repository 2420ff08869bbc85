"""What a run prints: the progress bar, text samples, and the summary at its end."""

import math
import shlex

from tqdm import tqdm

from data.corpus import Corpus
from errors import printable
from generation.generate import complete, generate
from generation.settings import Sampling
from training import plot
from training.session import Session, StepResult

SAMPLE_TOKENS = 100
SAMPLING = Sampling(repetition_penalty=1.15, temperature=0.7, min_p=0.05)  # reads well from a small model


def show_step(session: Session, bar: tqdm, result: StepResult) -> None:
    """Advance the bar, or where there is none print a line after every hundredth of the steps."""
    if math.isinf(result.gradient_norm):
        scale = session.scaler.get_scale()
        bar.write(f"step {result.step}: float16 overflow, update skipped; loss scale {scale:g}")
    data, steps = session.settings.data, session.steps
    speed = data.batch_size * data.sequence_length / result.seconds
    shown = {"loss": f"{result.loss:.3f}", "tok/s": f"{speed:,.0f}"}
    bar.set_postfix(shown, refresh=result.step == 1)
    bar.update()
    if bar.disable and result.step % max(1, steps // 100) == 0:
        line = ", ".join(f"{name} {value}" for name, value in shown.items())
        print(f"step {result.step} of {steps}: {line}", flush=True)


def samples(session: Session) -> str:
    """The first of --sample-prompts, at the end of the run all, and what the current weights continue them with.

    Of conversations: these or else a question that is held out, and the answers to them.
    """
    corpus, prompts = session.corpus, session.settings.run.sample_prompts
    context = session.settings.model.max_position_embeddings
    options = dict(max_new_tokens=min(SAMPLE_TOKENS, context - 1), sampling=SAMPLING)
    texts = []
    session.model.eval()
    for prompt in prompts if session.state.step == session.steps else prompts[:1]:
        if isinstance(corpus, Corpus):
            texts.append(complete(session.model, corpus.tokenizer, prompt, **options))
            continue
        messages = [{"role": "user", "content": prompt}] if prompt else corpus.question
        ids, ends = corpus.chat.encode(messages)[1 - context :], {corpus.tokenizer.eos_id, corpus.chat.end_of_turn}
        size = corpus.tokenizer.vocab_size
        tokens = generate(session.model, [ids], eos_ids=ends, vocab_size=size, **options).tokens[0]
        texts.append(f"{messages[-1]['content']}\n> {corpus.tokenizer.decode(tokens)}")
    session.model.train()
    return "\n\n".join("  | " + printable(text).replace("\n", "\n  | ") for text in texts)


def report_end(session: Session) -> None:
    """Draw loss.png; print how the run ended and the command to type next."""
    state, corpus, run_dir = session.state, session.corpus, shlex.quote(str(session.run_dir))
    plot.draw([session.run_dir], session.run_dir / "loss.png")
    if state.step < session.steps:
        resume = f"python train.py --resume {run_dir}"
        print(f"stopped and saved at step {state.step} of {session.steps}; resume with: {resume}")
        return
    is_text = isinstance(corpus, Corpus)
    if is_text:
        print(f"xz -9e on the same text: {corpus.xz_bits_per_byte():.4f} bits per byte; text hash {corpus.text_hash}")
    speed = state.tokens / state.seconds
    print(f"{state.step:,} steps, {state.tokens:,} tokens in {state.seconds:.0f} s of training, {speed:,.0f} tokens/s")
    print(f"best/ has the weights with the lowest validation loss, {state.best_validation_loss:.4f} nats per token")
    print(f"next: python generate.py {run_dir}{'' if is_text else ' --chat'}")
