"""`contrib.same`: good directories have no difference, and each fault that is put in on purpose is named.

With transformers 4: `TRANSFORMERS_4=PYTHON python -m pytest -m slow tests/contrib/test_same.py`, PYTHON of that
environment. With llama.cpp: `pip install llama-cpp-python gguf`.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from checkpoints.pretrained import load_pretrained, save_pretrained
from contrib import programs, same
from errors import UserError
from model.lora import add_lora
from tests.conftest import edit_json, edit_tensors, randomize_trained, run_python

FAMILIES = {
    "llama": {},
    "llama, biases of q, k and v": {"attention_bias": True, "tie_word_embeddings": False},
    "qwen3": {"qk_norm": True},
    "stablelm, long": {"norm": "layer", "attention_bias": True, "max_position_embeddings": 2100},
}
HAS_LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None


@pytest.fixture
def good(chat_model):
    """Write a small chat model with the given changes, and return its directory."""
    return lambda name="good", **changes: chat_model(name, **changes)[1]


@pytest.fixture
def compare(capsys):
    """The exit status, and of the columns whose program matches the cells that are not equal."""

    def run(*arguments: Path, programs: str = "", **options) -> tuple[int, dict[str, dict[str, str]]]:
        status = same.main(*map(str, arguments), as_json=True, **options)
        table = json.loads(capsys.readouterr().out)
        chosen = {program: cells for program, cells in table.items() if re.match(programs, program)}
        assert chosen
        differences = {}
        for program, cells in chosen.items():
            differences[program] = {name: cell for name, cell in cells.items() if cell not in ("equal", "not asked")}
        return status, differences

    return run


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_good_directory_of_every_family_has_no_difference(good, compare, changes):
    status, differences = compare(good(**changes))
    assert status == 0 and {*map(len, differences.values())} == {0}
    assert next(iter(differences)).startswith("transformers 5")
    assert any("llama" in program for program in differences) == HAS_LLAMA_CPP


def no_special_flag(folder: Path) -> None:
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    changed = [token | {"special": token["content"] != "<|end|>"} for token in tokens]
    edit_json(folder / "tokenizer.json", added_tokens=changed)


def two_bos(folder: Path) -> None:
    template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    edit_json(folder / "tokenizer_config.json", chat_template="{{ bos_token }}" + template)


def other_head(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=False)
    larger = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 1.001})  # noqa: E731
    edit_tensors(folder / "model.safetensors", larger)


LOGITS = {"logits", "loss per token"}
FAULTS = {
    "another base of the rotation": (
        lambda d: edit_json(d / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 2e4}),
        LOGITS,
        r"position ([1-9]|\d\d), token \d+: ours -?\d.*, theirs -?\d",
    ),
    "not special": (no_special_flag, {"ids of texts"}, r"'<unk>a<s>.* from \d+: ours \[.*, theirs \[6\]"),
    "a second BOS": (two_bos, {"conversations"}, r"'conversation 1' 'text' from 4: ours .*, theirs 's><\|user"),
    "another head": (other_head, LOGITS, r"position 0, token \d+: "),
    "ten times the eps": (lambda d: edit_json(d / "config.json", rms_norm_eps=1e-4), LOGITS, "position 0, token"),
    "EOS": (lambda d: edit_json(d / "generation_config.json", eos_token_id=2), {"EOS"}, r"ours \[6\], theirs \[\]"),
    "another temperature": (
        lambda d: edit_json(d / "generation_config.json", do_sample=True, temperature=0.71, top_k=0),
        {"sampling"},
        r"'temperature' ours 0, theirs 0\.71",
    ),
}


@pytest.mark.parametrize(("fault", "names", "cell"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_in_a_copy_is_named_in_all_programs(good, compare, tmp_path, fault, names, cell):
    model = good()
    other = shutil.copytree(model, tmp_path / "other")
    fault(other)
    status, differences = compare(model, programs="other in (prenorm|transformers)", other=str(other))
    assert status == 1 and len(differences) == 2
    for cells in differences.values():
        assert names <= cells.keys() <= names | {"greedy tokens"}
        assert re.search(cell, cells[min(names, key=["logits", *cells].index)])


def test_faults_that_only_one_program_falls_for_are_found_in_the_directory_alone(good, compare):
    """transformers makes text of a template's markers; it adds BOS although add_bos_token says that there is none."""
    model = good()
    edit_json(model / "tokenizer_config.json", split_special_tokens=True)
    [cells] = compare(model, programs="transformers")[1].values()
    assert cells.keys() == {"conversations"} and " 'ids' from 0: ours [1, 4" in cells["conversations"]
    edit_json(model / "tokenizer_config.json", split_special_tokens=False, add_bos_token=False)
    [cells] = compare(model, programs="transformers")[1].values()
    assert cells.keys() == {"ids with BOS"}
    assert re.fullmatch(r"from 0: ours \[(\d+)\], theirs \[1, \1\]", cells["ids with BOS"])


def test_an_adapter_is_asked_in_peft_and_half_of_its_alpha_is_found(good, compare, tmp_path):
    pytest.importorskip("peft")
    model = good()
    adapted = add_lora(load_pretrained(model), {"r": 4, "lora_alpha": 8, "base_model_name_or_path": str(model)}, 1)
    save_pretrained(randomize_trained(adapted), tmp_path / "adapter")
    other = shutil.copytree(tmp_path / "adapter", tmp_path / "other")
    edit_json(other / "adapter_config.json", lora_alpha=4)
    _, differences = compare(tmp_path / "adapter", programs=".*(prenorm|peft)", other=str(other))
    assert [{*cells} - {"greedy tokens"} for cells in differences.values()] == [set(), LOGITS, LOGITS]
    assert compare(model, other=str(tmp_path / "adapter"))[0] == 1


def test_who_refuses_says_so_and_does_not_agree(good, compare):
    status, differences = compare(good(norm_placement="post"))
    assert status == 1
    assert all(re.match("refused: .*(prenorm|llama.cpp)", cells["opens"]) for cells in differences.values())
    [cells] = [cells for program, cells in differences.items() if program.startswith("transformers")]
    assert "ids of texts" not in cells  # its tokenizer opens


def test_a_crash_of_another_program_is_no_refusal_and_one_of_this_program_is_raised(good, compare, monkeypatch):
    model, unknown = good(), ValueError("this model is unknown")
    monkeypatch.setattr(programs, "transformers", Mock(__name__="transformers", side_effect=unknown))
    assert compare(model, programs="transformers")[1]["transformers"]["opens"] == "refused: this model is unknown"
    programs.transformers.side_effect = TypeError("'NoneType' object is not iterable")
    cell = compare(model, programs="transformers")[1]["transformers"]["opens"]
    assert cell == "crashed: TypeError: 'NoneType' object is not iterable"
    monkeypatch.setattr(programs, "prenorm", Mock(__name__="prenorm", side_effect=TypeError))
    with pytest.raises(TypeError):
        compare(model)


@pytest.mark.skipif(os.name == "nt", reason="Windows starts no program by a line #!/bin/sh")
def test_a_program_that_is_killed_has_crashed(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho a warning >&2\nkill -SEGV $$\n")
    python.chmod(0o755)
    questions = programs.Questions([], [], [0], [0], [1.0], {"logits": torch.ones(1, 2)})
    _, cells = programs.compare_elsewhere("model", questions, str(python), "llama_cpp")
    assert cells == {"opens": "crashed: killed by SIGSEGV, an error inside llama_cpp; try another build of it"}


def test_logits_that_are_not_finite_or_too_many_are_differences(good, compare, tmp_path):
    model, other = good(), good("other", vocab_size=301)
    assert compare(model, other=str(other))[1]["other in prenorm"]["logits"] == "ours 300 logits, theirs 301"
    cell = programs.logits_difference([0, 7], torch.ones(2), torch.ones(2, 3), torch.full((2, 3), torch.nan))
    assert cell.startswith("position 0, token 0: ours 1, theirs nan")


def test_no_code_of_a_checkpoint_is_executed_and_nothing_is_unpickled(good, compare, tmp_path):
    model = good()
    (model / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    evil = {"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.B", "AutoTokenizer": ["evil.C", "evil.C"]}
    edit_json(model / "config.json", auto_map=evil)
    edit_json(model / "tokenizer_config.json", auto_map=evil)
    assert compare(model)[0] == 0 and not (tmp_path / "executed").exists()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        compare(model)


def test_llama_cpp_alone_is_asked_about_a_gguf_file(good, compare, tmp_path, monkeypatch):
    model, file = good(), tmp_path / "model.gguf"
    with pytest.raises(UserError, match=r"model\.gguf does not exist"):
        compare(model, other=str(file))
    pytest.importorskip("gguf")
    from contrib.gguf_file import write_gguf

    write_gguf(model, file)
    if not HAS_LLAMA_CPP:
        with pytest.raises(UserError, match=r"is not installed: pip install llama-cpp-python gguf"):
            compare(model, other=str(file))
        find_spec = same.find_spec
        monkeypatch.setattr(same, "find_spec", lambda name: name == "llama_cpp" or find_spec(name))
        ours = lambda place, questions, program: programs.compare(programs.prenorm, str(model), questions)  # noqa: E731
        monkeypatch.setattr(programs, "compare_elsewhere", ours)
    status, differences = compare(model, programs="model.gguf in", other=str(file))
    assert status == 0 and [*differences.values()] == [{}]


@pytest.mark.slow
def test_the_command_asks_another_python_and_says_which_directory_only_transformers_4_reads_otherwise(good):
    model, python = good(), os.environ.get("TRANSFORMERS_4", sys.executable)
    command = ["-m", "contrib.same", model, "--python", python]
    done = run_python(*command)
    assert done.returncode == 0 and done.stdout.count("equal") >= 16, done.stderr
    edit_json(model / "config.json", rope_theta=2e4)  # transformers 5 reads rope_parameters
    done = run_python(*command, "--json")
    table = {program: {*cells.values()} != {"equal"} for program, cells in json.loads(done.stdout).items()}
    differences = [differs for program, differs in table.items() if program.startswith("transformers")]
    assert differences == [False, "TRANSFORMERS_4" in os.environ] and done.returncode == int(any(table.values()))
