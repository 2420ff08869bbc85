"""Teaching a model conversations, ours beside TRL's SFTTrainer: `python -m benchmarks.conversations RUN`.

RUN has learned to talk, such as runs/talk. Both train all its weights with AdamW on python-chat, and take turns. Ours
packs conversations into rows; TRL pads them, as its packing needs FlashAttention. Tokens are counted without padding.
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
from errors import exit_on_user_error
from model.count import flops_per_token
from model.device import choose_training_dtype, device_name

STEPS = 4  # of a block


def ours(run: str, dtype: str, folder: Path) -> dict[str, timing.Block]:
    from training.loop import train_steps
    from training.session import no_log, set_up
    from training.settings import parse

    settings = parse(["--init-from", run, "--data", "python-chat", "--dtype", dtype], "").settings
    session = set_up(settings, folder / "ours", resume=False, log=no_log)
    results, batch = train_steps(session), partial(session.corpus.batch, settings.run.seed)

    def seconds_per_token() -> float:
        start = time.perf_counter()
        steps = [result.step - 1 for result in itertools.islice(results, STEPS)]
        seconds = time.perf_counter() - start
        return seconds / sum(int((batch(step, settings.data.batch_size)[2] > 0).sum()) for step in steps)

    return {"token": seconds_per_token}


def theirs(run: str, dtype: str, folder: Path, conversations: int) -> dict[str, timing.Block]:
    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from data.readers import read_rows
    from data.sources import resolve

    path = find_checkpoint(run)
    rows = [row for file in resolve(["python-chat"], "text", folder) for _, row in read_rows(file)]
    options = {"per_device_train_batch_size": conversations, "max_length": 512, "assistant_only_loss": True}
    options |= {"bf16": dtype == "bfloat16", "use_cpu": not torch.cuda.is_available(), "report_to": []}
    options |= {"activation_checkpointing": False, "disable_tqdm": True}
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        args=trl.SFTConfig(str(folder / "trl"), **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(path, pad_token="<unk>"),
    )
    trainer.current_gradient_accumulation_steps = 1
    optimizer, batches = trainer.create_optimizer(), itertools.cycle(trainer.get_train_dataloader())

    def seconds_per_token() -> float:
        tokens, start = 0, time.perf_counter()
        for batch in itertools.islice(batches, STEPS):
            trainer.training_step(trainer.model, batch)
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tokens += int(batch["attention_mask"].sum())
        return (time.perf_counter() - start) / tokens

    return {"token": seconds_per_token}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversations", description=__doc__.split("\n\n")[0])
    parser.add_argument("run", help="a directory that transformers opens, with a chat template")
    parser.add_argument("--turns", type=int, default=5, help="of four steps each (default: %(default)s)")
    arguments, tables = parser.parse_args(), []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for dtype in ("float32", "bfloat16"):
        rate = timing.product_rate(device, choose_training_dtype(dtype, device))
        limit = flops_per_token(load_config(find_checkpoint(arguments.run)), 512) / rate
        with tempfile.TemporaryDirectory() as folder:
            common = arguments.run, dtype, Path(folder)
            makers = {f"TRL, {n} conversations a step": partial(theirs, *common, n) for n in (8, 32)}
            makers["ours, 8 rows a step"] = partial(ours, *common)
            limits = {key: {"token": limit} for key in makers}
            title = f"Conversations, {dtype}, on {device_name(device)}"
            tables.append(timing.compare(title, makers, limits, arguments.turns, tokens=1))
    timing.print_json(device, tables=tables)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
