"""Teaching a model conversations, ours beside TRL's SFTTrainer: `python -m benchmarks.conversations RUN`.

RUN is a directory that has learned to talk, such as runs/talk. Both train all of its weights with AdamW on python-chat,
and take turns. Ours packs conversations into rows; TRL pads them, as its packing needs FlashAttention, which is for
GPUs. Tokens are those of conversations, without padding.
"""

import argparse
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks import timing
from checkpoints.families import load_config
from checkpoints.find import find_checkpoint
from data.conversations import rows_of
from data.sources import resolve
from errors import exit_on_user_error
from model.count import flops_per_token
from model.device import choose_device, choose_training_dtype, device_name
from training.loop import train_steps
from training.session import no_log, set_up
from training.settings import parse

STEPS = 4  # of a block


def ours(directory: str, dtype: str, device: torch.device, folder: Path) -> dict[str, timing.Block]:
    flags = ["--init-from", directory, "--data", "python-chat", "--dtype", dtype, "--device", str(device)]
    settings = parse(flags, "benchmarks.conversations").settings
    session = set_up(settings, folder / "ours", resume=False, log=no_log)
    results, batch_size = train_steps(session), settings.data.batch_size

    def run() -> float:
        """Seconds of a token."""
        first, start = session.state.step, time.perf_counter()
        for _ in itertools.islice(results, STEPS):
            pass
        seconds = time.perf_counter() - start
        batches = (session.corpus.batch(settings.run.seed, first + i, batch_size) for i in range(STEPS))
        return seconds / sum(int((documents > 0).sum()) for _, _, documents in batches)

    return {"a token": run}


def theirs(directory: str, dtype: str, device: torch.device, folder: Path, sequences: int) -> dict[str, timing.Block]:
    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = find_checkpoint(directory)
    rows = [row for _, row in rows_of(resolve(["python-chat"], "text", Path(".cache")))]
    options = {"per_device_train_batch_size": sequences, "max_length": 512, "assistant_only_loss": True}
    options |= {"bf16": dtype == "bfloat16", "use_cpu": device.type == "cpu", "activation_checkpointing": False}
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        args=trl.SFTConfig(str(folder / "trl"), report_to=[], disable_tqdm=True, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(path, pad_token="<unk>"),
    )
    trainer.current_gradient_accumulation_steps = 1
    optimizer, batches = trainer.create_optimizer(), itertools.cycle(trainer.get_train_dataloader())

    def run() -> float:
        """Seconds of a token."""
        tokens, start = 0, time.perf_counter()
        for batch in itertools.islice(batches, STEPS):
            trainer.training_step(trainer.model, batch)
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tokens += int(batch["attention_mask"].sum())
        return (time.perf_counter() - start) / tokens

    return {"a token": run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversations", description=__doc__.split("\n\n")[0])
    parser.add_argument("run", help="a directory that transformers opens, with a chat template")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: %(default)s")
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[8, 32], help="TRL's batches (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="of 4 steps each (default: %(default)s)")
    arguments, tables = parser.parse_args(), []
    device = choose_device(arguments.device)
    for dtype in arguments.dtypes:
        rate = timing.product_rate(device, choose_training_dtype(dtype, device))
        with tempfile.TemporaryDirectory() as folder:
            common = arguments.run, dtype, device, Path(folder)
            makers = {f"TRL, {n} conversations a step": partial(theirs, *common, n) for n in arguments.sequences}
            makers["ours, 8 rows a step"] = partial(ours, *common)
            limit = flops_per_token(load_config(find_checkpoint(arguments.run)), 512) / rate
            limits = {name: {"a token": limit} for name in makers}
            title = f"Conversations, {dtype}, on {device_name(device)}"
            tables.append(timing.compare(title, makers, limits, arguments.turns, tokens=1))
    timing.print_json(device, tables=tables)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
