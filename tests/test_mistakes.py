"""The mistakes that people make, each with the line that it gets: what is wrong, where, and what to do."""

import io
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import ablate
import generate
import serve
import train
from errors import exit_on_user_error
from flags import call_with_flags
from training import plot

PROGRAMS = {script.__name__: script.main for script in (train, generate, ablate)}
PROGRAMS |= {"serve": lambda: call_with_flags(serve.main), "plot": lambda: call_with_flags(plot.main)}

# A command line and a pattern of its error. RUN is a run of two steps, BAD a folder of what is not right.
MISTAKES = r"""
train --data nothere -> no file, folder or known text is called "nothere"; give --data a path
train --data BAD/small.txt --data BAD/chat.jsonl -> --data is given twice; give it once, with all its values
train --data BAD/small.txt -> the text has 2 tokens to train on, but one batch .* needs 4,096; give more text, or
train --data BAD/chat.jsonl -> .*chat.jsonl has conversations; to learn them give --init-from MODEL
train --init-from RUN --data BAD/chat.jsonl -> the files have 1 different conversation, too few to learn from; give more
train --data BAD/broken.jsonl -> .*broken.jsonl, row 1 .*
train --data BAD/broken.parquet -> .*broken.parquet .*Parquet file size is 4 bytes
train --config tinny -> tinny is neither a file nor one of .* Did you mean tiny\?
train --epochs 3 -> --epochs is not a setting: training is measured in --steps
train --sequence-length 4096 -> --sequence-length 4096 is above --max-position-embeddings 512
train --first-sequence-length 100 -> --first-sequence-length 100 is not --sequence-length 512 divided by
train --out= -> out is '': Expected `str` of length >= 1
train --init-from RUN --freeze norms -> --freeze norms matches no parameter; the names are embed_tokens.weight,
train --norm batch --activation-checkpointing -> --norm batch .*leave out --activation-checkpointing
train --resume nothere -> .*nothere.* does not exist; give the folder of a run. Newest runs: RUN
train --resume RUN --out other -> --resume uses the settings of the run itself; leave out --config
train --out RUN -> .*RUN is not empty, and runs are never overwritten; use another --out, or --resume
train --init-from nothere -> nothere does not exist; give a directory .* Newest runs: RUN
train --init-from BAD/pickled -> .*pickled has pickled weights, which can run code and are never opened; save them
train --init-from BAD/gguf/model.gguf -> .*model.gguf has GGUF weights, which can be written here but not read
generate BAD/adapter --prompt a -> .*nothere does not exist; .*: python generate.py MODEL --adapter .*adapter
train --init-from BAD/adapter -> .*adapter is an adapter; make it a model: python generate.py '.*adapter' --merge NEW
train --init-from RUN --lora 4 --norm layer -> --lora leaves the model as it is; leave out --norm and other flags
train --init-from RUN --lora 4 --optimizer muon -> LoRA needs --optimizer=adamw\.
train --init-from BAD/lfs -> .*lfs/model.safetensors .*git lfs pull
train --data BAD/small.txt --device toaster -> --device toaster cannot be used here
train --lora 8 -> LoRA needs --init-from MODEL\.$
train --eval-only -> --eval-only needs --init-from
train --eval-only --resume RUN -> --eval-only evaluates --init-from .*RUN; leave out --resume
train --eval-only --prepare -> --prepare, --eval-only and --dry-run exclude each other; give one
train --eval-only RUN --data x -> --eval-only takes no value; a run is named by --init-from .*RUN
train --init-from RUN/best/model.safetensors -> .*model.safetensors is a file; give the directory
generate BAD/empty -> .*BAD/empty has no config.json, best/ or last/
generate BAD/no_tokenizer --prompt a -> there is no .*no_tokenizer/tokenizer.model; give
generate RUN --prompt a --temperature -1 -> temperature is -1
generate RUN --chat -> .*RUN/best has no chat template, so it only continues text; teach it to talk: python train
generate RUN --prompt a --max-new-tokens 0 -> --max-new-tokens, .* must be at least 1
ablate --vary lora_rank=0,4 -> lora_rank is not a setting that arms can have. Did you mean lora\?
ablate --vary lora=0,4 -> lora is '0': it must be at least 1, or none
ablate nothere -> nothere is no file, experiment or study
ablate reprot nothere -> reprot is no .* Did you mean report\?
ablate report -> Missing from ablate.py report: FOLDER
train --freeze --norm rms -> --freeze needs a value
train --init-from= --steps 5 -> --init-from needs a value
train ——norm rms -> ——norm begins with another dash; write two hyphens: --norm
train —no-norm-bias -> —no-norm-bias begins with another dash; write two hyphens: --no-norm-bias
generate RUN —hola --stop —end —seed 2 -> —seed begins with another dash; write two hyphens: --seed
generate RUN def --stop= -> --stop needs a text
generate RUN --max-new-tokens 十 -> --max-new-tokens is '十', no number; see --help
train RUN --data x -> .*RUN is no flag; write --init-from \(or --resume\) .*RUN
train --eval-only --init-from RUN --data x --norm layer -> --eval-only takes the model as it is; leave out --norm
generate RUN --prompt a --device cuda:99 -> --device cuda:99 cannot be used here
generate RUN --merge NEW -> --merge: .* is no adapter
generate RUN --prompt a --adapter RUN -> .*RUN is no adapter, as it has no adapter_config.json
ablate --a norm=rms -> --b is missing; --a "" is the config as it is
ablate judge --campaign nowhere -> --campaign judges an idea at a time: give it as --b
ablate judge --pairs x.csv --margin 0.1 -> --pairs has the losses of a and b; of other flags it takes
ablate --vary norm=rms -> a comparison needs two arms or more
ablate --seed 5 -> Unrecognized options: --seed, 5; see --help. Did you mean --first-seed\?
ablate --vary norm=layer, rms -> rms is no plan; join values by commas: --vary norm=layer,rms
ablate --vary weight_decay 0.1 -> --vary weight_decay has no values; write --vary weight_decay=V,V
ablate --a norm=rms --b qk_norm=true, -> qk_norm=true,: a space separates settings
ablate --vary weight_decay=0.1,0.5,norm=layer,rms -> .*norm=layer,rms: a space separates settings .--vary again
ablate --a x=1 y=2 -> y=2 stands alone; settings of one flag are one text in quotes
ablate --vary freeze=,norms -> freeze norms matches no parameter
train --input /a/path/to/a/folder/of/texts/columns/text.txt -> .* /a/path/to/a/folder/of/texts/columns/text.txt;
train --steps abc -> --steps is 'abc', no whole number; see --help
train --steps -> --steps needs a value after it; see --help
train --norm -> .*one of rms, layer, 
train --dtype RMS -> invalid choice 'RMS' for argument '--dtype'. Expected one of .*; see --help
train --norm RMS -> norm is 'RMS': it must be one of .*rms, .* Did you mean rms\?
generate RUN --prompt a --temprature 1 -> Unrecognized options: .* Did you mean --temperature\?
ablate --norm layer -> norm is a setting of train.py; --vary norm=VALUE sets it in all runs, --vary
ablate --vary lora=none,8 --steps 3 -> LoRA needs init_from=MODEL\.$
ablate --vary data=BAD/chat.jsonl --vary norm=layer,rms -> .*chat.jsonl has conversations; to learn them give init_from=
ablate judge --a norm=layer --b norm=rms --quick -> --quick is not for judge
ablate judge -> judge needs --b "SETTING=VALUE" and, without --campaign, --a
ablate --lr 1e-3 --learning-rates 2e-3 -> --learning-rates is given twice; give it once
ablate --jobs -1 --dry-run -> --jobs -1 must be at least 1
serve RUN --port 99999 -> .*port must be 0-65535.*; give another --port or --host
plot nothere -> nothere has no metrics.jsonl; give the folder of a run
plot -> no run is given; give folders of runs
plot RUN --out loss.txt -> --out loss.txt must end in .png, .svg or .pdf
"""
ROWS = [line.split(" -> ") for line in MISTAKES.strip().splitlines()]


def train_small_run(folder: Path, *flags: str) -> None:
    """Train two steps in `folder`/RUN."""
    text = folder / "text.txt"
    text.write_text("".join(f"The quick brown fox jumps {n} times over {n * n} dogs.\n" for n in range(900)))
    shape = "--vocab-size 300 --hidden-size 16 --intermediate-size 24 --num-hidden-layers 1 --num-attention-heads 2"
    shape += " --num-key-value-heads 1 --max-position-embeddings 64 --sequence-length 16 --batch-size 2 --device cpu"
    places = ["--data", str(text), "--cache", str(folder / "cache"), "--out", str(folder / "RUN")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *shape.split(), *places, *"--steps 2 --warmup-steps 1".split(), *flags])
        patch.delenv("COLUMNS", raising=False)
        assert train.main() == 0 and "COLUMNS" not in os.environ


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """RUN and BAD."""
    folder = tmp_path_factory.mktemp("mistakes")
    train_small_run(folder)
    bad = folder / "BAD"
    for name in ("lfs", "no_tokenizer"):
        shutil.copytree(folder / "RUN" / "best", bad / name)
    for name in ("empty", "pickled", "gguf", "adapter"):
        (bad / name).mkdir()
    files = {
        "small.txt": b"short",
        "chat.jsonl": b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        "broken.jsonl": b'{"text": "a"\n',
        "broken.parquet": b"PAR1",
        "pickled/config.json": (folder / "RUN" / "best" / "config.json").read_bytes(),
        "pickled/pytorch_model.bin": b"PK\3\4",
        "gguf/model.gguf": b"GGUF",
        "adapter/adapter_config.json": b'{"base_model_name_or_path": "nothere"}',
        "lfs/model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }
    for name, content in files.items():
        (bad / name).write_bytes(content)
    for path in (bad / "no_tokenizer").glob("tokenizer*"):
        path.unlink()
    return folder


@pytest.mark.parametrize(("command", "line"), ROWS, ids=[command for command, _ in ROWS])
def test_a_mistake_is_one_line(folder, command, line, monkeypatch, capsys):
    program, *arguments = command.split()
    arguments = [re.sub("^(RUN|BAD)", lambda match: str(folder / match[0]), argument) for argument in arguments]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal,
    monkeypatch.setenv("COLUMNS", "50")  # a narrow one, which must break no word
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        PROGRAMS[program]()
    *notes, said = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and not any("Error" in note for note in notes)
    assert re.match(f"error: {line}", said), said
