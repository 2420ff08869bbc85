"""What a run prints: the progress bar, evaluations, text samples, and the summary at its end."""

import math
import shlex
from collections.abc import Sequence

from tqdm import tqdm

from checkpoints import pretrained
from data.tokenizer import encode_prompt, tokens_after
from errors import counted, printable
from generation.generate import generate
from generation.settings import small_model_sampling
from training import checkpoint, metrics, plot
from training.evaluate import Evaluation
from training.session import Session
from training.step import StepResult

SAMPLE_TOKENS = 100
FEW_BYTES = 10_000  # of text, of which xz's own header would be a large part


def show_step(session: Session, bar: tqdm, result: StepResult) -> None:
    """Advance the bar, or where there is none print a line after every hundredth of the steps."""
    if math.isinf(result.gradient_norm):
        tqdm.write(f"step {result.step}: float16 overflow, update skipped; loss scale {session.scaler.get_scale():g}")
    data = session.settings.data
    speed = f"{data.batch_size * data.sequence_length / result.step_seconds:,.0f}"
    bar.set_postfix({"loss": f"{result.loss:.3f}", "tok/s": speed}, refresh=result.step == 1)
    bar.update()
    if bar.disable and result.step % max(1, session.steps // 100) == 0:
        print(f"step {result.step} of {session.steps}: loss {result.loss:.3f}, tok/s {speed}", flush=True)


def show_evaluation(session: Session, result: Evaluation) -> None:
    """Print an evaluation, what it means when the loss has risen twice, and before the end a text sample."""
    tqdm.write(f"step {session.state.step}: validation {result}")
    losses = [*metrics.validation_losses(session.run_dir).values()]
    rises = [has_risen(losses[:end]) for end in range(3, len(losses) + 1)]
    if rises and rises[-1] and not any(rises[:-1]):  # for the first time
        meaning = "the model learns its text by heart. best/ keeps the best weights"
        fix = "give more text, fewer --steps or a smaller model"
        tqdm.write(f"note: the validation loss has risen twice: {meaning}; {fix}")
    # With --shard there are no samples, as each token would gather all weights.
    if session.state.step < session.steps and not session.processes.sharded:
        tqdm.write(samples(session, session.settings.run.sample_prompts[:1]))


def has_risen(losses: Sequence[float]) -> bool:
    """Whether the last two losses rose, to more than 1% above the lowest: less is noise."""
    return losses[-3] < losses[-2] < losses[-1] and losses[-1] > 1.01 * min(losses)


def samples(session: Session, prompts: Sequence[str]) -> str:
    """What the current weights continue prompts with, or how they answer questions."""
    chat, tokenizer = session.corpus.chat, session.corpus.tokenizer
    context = session.model.config.max_position_embeddings
    new = min(SAMPLE_TOKENS, context - 1)
    options = dict(max_new_tokens=new, vocab_size=tokenizer.vocab_size, sampling=small_model_sampling(chat=bool(chat)))
    options["eos_ids"] = {tokenizer.eos_id, *(chat.ends if chat else ())}
    texts = []
    session.model.eval()
    for prompt in prompts:
        ids = chat.encode([{"role": "user", "content": prompt}]) if chat else encode_prompt(tokenizer, prompt)
        first_tokens = None if chat else tokens_after(tokenizer, prompt)
        room = context - min(new, context // 2)
        ids = ids[-room:]  # the end of a longer prompt
        new_tokens = generate(session.model, [ids], first_tokens=[first_tokens], **options)
        tokens = [token.id for token in new_tokens if token.end != "eos"]
        text = f"{prompt}\n> {tokenizer.decode(tokens)}" if chat else tokenizer.decode(ids + tokens)
        texts.append("  | " + printable(text).replace("\n", "\n  | "))
    session.model.train()
    return "\n\n".join(texts)


def report_end(session: Session) -> None:
    """Draw loss.png; print samples of the best weights, how the run ended and the command to type next."""
    state, corpus = session.state, session.corpus
    run_dir = shlex.quote(str(session.run_dir))
    plot.draw([session.run_dir], session.run_dir / "loss.png")
    if state.step < session.steps:
        resume = f"resume with:\n  python train.py --resume {run_dir}"
        print(f"stopped and saved at step {state.step} of {session.steps}; {resume}")
        return
    prompts = session.settings.run.sample_prompts
    best_loss = state.best_validation_loss
    losses = metrics.validation_losses(session.run_dir)
    best_step = min(losses, key=losses.get, default=state.step)
    of_step = "" if best_step == state.step else f" (step {best_step})"
    if not session.processes.sharded:
        best = checkpoint.find_complete(session.run_dir / "best")
        if best is not None:
            pretrained.load_weights(session.model, best)
        if of_step:
            print(f"samples from best/{of_step}:")
        print(samples(session, prompts))
    if best_loss > math.log(session.model.config.vocab_size):
        fix = "a smaller --vocab-size" if session.settings.run.init_from is None else "a larger --learning-rate"
        steps = "more" if best_step == state.step else "fewer"  # where the loss has risen, more do not help
        print(f"note: it predicts this text worse than chance; give more text, {steps} --steps or {fix}")
    if corpus.chat or corpus.has_long_tokens or corpus.validation_bytes < FEW_BYTES:
        print(f"text hash {corpus.text_hash}")
    else:
        print(f"xz -9e on the same text: {corpus.xz_bits_per_byte():.4f} bits per byte; text hash {corpus.text_hash}")
    speed = f"{state.tokens / state.seconds:,.0f} tokens/s"
    print(f"{counted(state.step, 'step')}, {state.tokens:,} tokens in {state.seconds:.0f} s of training, {speed}")
    token = "answer token" if corpus.chat else "token"
    print(f"best/ has the weights with the lowest validation loss, {best_loss:.4f} nats per {token}{of_step}")
    if best_step == 0:
        print("note: training has made the model no better; try another --learning-rate, or more --steps")
    first_words = printable(" ".join(prompts[0].split()[:5]))
    prompt = shlex.quote(first_words) if first_words else ""
    print(f"next: python generate.py {run_dir} {'--chat' if corpus.chat else prompt}".rstrip())
