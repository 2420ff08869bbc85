"""What a run prints: the progress bar, text samples, and the summary at its end."""

import math
import shlex

from tqdm import tqdm

from checkpoints import pretrained
from data.corpus import Corpus
from errors import printable
from generation.generate import encode_prompt, generate, tokens_after
from generation.settings import SMALL_MODELS
from training import checkpoint, plot
from training.session import Session, StepResult

SAMPLE_TOKENS = 100


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
    new, tokenizer, texts = min(SAMPLE_TOKENS, context - 1), corpus.tokenizer, []
    prompts = prompts or (corpus.first_words() if isinstance(corpus, Corpus) else [""])
    session.model.eval()
    for prompt in prompts if session.state.step == session.steps else prompts[:1]:
        if isinstance(corpus, Corpus):
            ids, first, ends = encode_prompt(tokenizer, prompt), tokens_after(tokenizer, prompt), {tokenizer.eos_id}
        else:
            messages = [{"role": "user", "content": prompt}] if prompt else corpus.question
            ids, first, ends = corpus.chat.encode(messages), None, {tokenizer.eos_id, *corpus.chat.ends}
        ids = ids[min(new, context // 2) - context :]  # of a longer prompt, the end
        options = dict(eos_ids=ends, vocab_size=tokenizer.vocab_size, first_tokens=[first], sampling=SMALL_MODELS)
        tokens = generate(session.model, [ids], max_new_tokens=new, **options).tokens[0]
        if isinstance(corpus, Corpus):
            texts.append(tokenizer.decode(ids + tokens))
        else:
            texts.append(f"{messages[-1]['content']}\n> {tokenizer.decode(tokens)}")
    session.model.train()
    return "\n\n".join("  | " + printable(text).replace("\n", "\n  | ") for text in texts)


def report_end(session: Session) -> None:
    """Draw loss.png; print samples of the best weights, how the run ended and the command to type next."""
    state, corpus = session.state, session.corpus
    folder = str(session.run_dir)
    run_dir = shlex.quote(f"./{folder}" if folder.startswith("-") else folder)  # no flag
    plot.draw([session.run_dir], session.run_dir / "loss.png")
    if state.step < session.steps:
        resume = f"python train.py --resume {run_dir}"
        print(f"stopped and saved at step {state.step} of {session.steps}; resume with: {resume}")
        return
    if not session.saver.sharded:
        if (best := checkpoint.find_complete(session.run_dir / "best")) is not None:
            pretrained.load_weights(session.model, best)
        print(samples(session))
    is_text = isinstance(corpus, Corpus)
    if is_text:
        print(f"xz -9e on the same text: {corpus.xz_bits_per_byte():.4f} bits per byte; text hash {corpus.text_hash}")
    speed = state.tokens / state.seconds
    print(f"{state.step:,} steps, {state.tokens:,} tokens in {state.seconds:.0f} s of training, {speed:,.0f} tokens/s")
    print(f"best/ has the weights with the lowest validation loss, {state.best_validation_loss:.4f} nats per token")
    prompts = session.settings.run.sample_prompts or (corpus.first_words() if is_text else [])
    prompt = printable(" ".join([*prompts, ""][0].split()[:5]))
    print(f"next: python generate.py {run_dir} {shlex.quote(prompt) if is_text else '--chat'}")
