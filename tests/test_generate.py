"""``automoe generate``: what a checkpoint answers is what ``transformers`` generates from it."""

from __future__ import annotations

import copy
import io
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from automoe import cli
from automoe.config.frozen import save_config
from automoe.config.schema import CheckpointConfig, Config, LoraConfig, MoEConfig
from automoe.errors import CheckpointError, DataError, spelled_out
from automoe.generate import Speaker, checkpoint_of, load_checkpoint
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.read import load_hf
from automoe.hf.transformers_models import num_parameters
from automoe.parallel.parallelize import build_decoder
from automoe.storage import guarded
from tests.support.chat import save_tokenizer
from tests.support.class_models import hf_class_config, save_class
from tests.support.hf_models import save_small_hf


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "hf"
    save_small_hf("qwen3_moe", folder, other_sizes={"vocab_size": 304})
    return save_tokenizer(folder, "chatml")


def expected(folder: Path, text: str, count: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    for _ in range(count):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return tokenizer.decode(ids[0, -count:], skip_special_tokens=True)


def test_questions_texts_and_a_chat(checkpoint: Path, capsys, monkeypatch) -> None:
    asked = "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    words = ["generate", str(checkpoint), "--max-new-tokens", "6"]
    assert cli.main([*words, "--system", "Short.", "Who?"]) == 0
    answer = expected(checkpoint, asked, 6)
    written = capsys.readouterr()
    assert written.out == f"> Who?\n{answer}\n" and "note: cut off after 6 tokens" in written.err
    assert cli.main([*words, "--text", "the answer"]) == 0
    assert capsys.readouterr().out == f"the answer{expected(checkpoint, 'the answer', 6)}\n"
    # A tokenizer that puts a token before every text, and one behind it: the first alone belongs to what goes on.
    speaker = Speaker(checkpoint, 6)
    bos, eos = ((token, speaker.tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|endoftext|>"))
    speaker.tokenizer.bos_token = bos[0]
    around = TemplateProcessing(single=f"{bos[0]} $A {eos[0]}", special_tokens=[bos, eos])
    speaker.tokenizer.backend_tokenizer.post_processor = around
    assert speaker.answer("the answer") == expected(checkpoint, f"{bos[0]}the answer", 6)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n\nAnd?\n"))
    assert cli.main([*words, "--system", "Short."]) == 0
    second = asked + answer + "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert capsys.readouterr().out == f"{answer}\n{expected(checkpoint, second, 6)}\n"


def test_a_class_without_a_native_family_answers(tmp_path: Path, capsys) -> None:
    save_class("flex_olmo", tmp_path, vocab_size=304)
    save_tokenizer(tmp_path, "chatml")
    assert cli.main(["generate", str(tmp_path), "--max-new-tokens", "6", "--text", "the answer"]) == 0
    assert capsys.readouterr().out == f"the answer{spelled_out(expected(tmp_path, 'the answer', 6))}\n"


def test_memory_that_no_file_accounts_for_is_refused(tmp_path: Path, capsys, monkeypatch) -> None:
    save_class("granitemoehybrid", tmp_path, vocab_size=304)
    save_tokenizer(tmp_path, "chatml")
    words = ["generate", str(tmp_path), "--max-new-tokens", "1", "--text", "a"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU's memory is not limited
    assert cli.main(words) == 0
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"mamba_chunk_size": 4000}))
    monkeypatch.setattr(guarded, "MAX_BYTES", 64 << 20)  # two tokens take 4 heads * 4000 * 4000 numbers
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert load_refused(tmp_path) and resource.getrlimit(resource.RLIMIT_DATA) == before
    for model_type, keys, refused in (
        ("gptj", {"rotary_dim": 8}, False),
        ("gptj", {"rotary_dim": 8, "max_position_embeddings": 10**9}, True),
        ("codegen", {"rotary_dim": 8, "max_position_embeddings": 10**9}, True),
        ("gpt2", {"max_position_embeddings": 1024}, False),
    ):
        built = num_parameters(hf_class_config(model_type, **keys))
        assert (built > 10**9) == refused, (model_type, built)


def load_refused(folder: Path) -> bool:
    with pytest.raises(DataError, match="a forward pass of its model takes more than 0.1 GB of memory"):
        load_checkpoint(folder)
    return True


def test_what_cannot_answer_says_why(checkpoint: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    assert cli.main(["generate", str(tmp_path), "Who?"]) == 2
    assert "is neither a run directory (config.yaml) nor a HuggingFace checkpoint" in capsys.readouterr().err
    for wrong, said in (("a\udcff", "is not UTF-8"), ("x " * 400, "and the model has 256 positions")):
        assert cli.main(["generate", str(checkpoint), "--text", wrong]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert cli.main(["generate", str(checkpoint)]) == 2 and "is not UTF-8" in capsys.readouterr().err
    (checkpoint / "chat_template.jinja").rename(tmp_path / "aside")
    assert cli.main(["generate", str(checkpoint), "Who?"]) == 2
    assert "its tokenizer has no chat template. Use --text" in capsys.readouterr().err
    (tmp_path / "aside").rename(checkpoint / "chat_template.jinja")


def test_tools_and_template_arguments_reach_the_prompt(checkpoint: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(checkpoint, folder)
    template = "{% for t in tools or [] %}{{ t.function.name + ' ' }}{% endfor %}{{ tone }} {{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template)
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}]))
    words = ["generate", str(folder), "--max-new-tokens", "4"]
    for options, prompt in (
        (["--template-args", '{"tone": "kind"}'], "kind Who?"),
        (["--template-args", '{"tone": "kind"}', "--tools", str(tools)], "add kind Who?"),
        (["--tools", str(tools)], "add  Who?"),
    ):
        assert cli.main([*words, *options, "Who?"]) == 0
        assert capsys.readouterr().out == f"> Who?\n{spelled_out(expected(folder, prompt, 4))}\n"
    tools.write_text('{"name": "add"}')
    for options, said in (
        (["--template-args", "tone=kind"], "argument --template-args: tone=kind is not a JSON object"),
        (["--template-args", "[1]"], "[1] is not a JSON object"),
        (["--tools", str(tools)], f"{tools} is not a file with a JSON list of tools"),
        (["--tools", str(tmp_path / "none")], "is not a file with a JSON list of tools"),
        (["--template-args", '{"tone": 1}', "--text"], "--text uses no chat template"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*words, *options, "Who?"])
        assert said in capsys.readouterr().err


def test_kernels_that_are_not_installed_are_no_news(tmp_path: Path) -> None:
    """Answers, scores and exports: what a class computes without a kernel of another package is right."""
    save_small_hf("qwen3_next", tmp_path / "hf", other_sizes={"vocab_size": 304})
    save_tokenizer(tmp_path / "hf", "chatml")
    code = (
        "import sys; from automoe import cli; from automoe.convert import main\n"
        "assert not main([sys.argv[1], '--out', sys.argv[2]])\n"
        "assert not cli.main(['generate', sys.argv[2], '--max-new-tokens', '2', '--text', 'a'])"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "hf"), str(tmp_path / "out")]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "implementation" not in ran.stderr and "fall" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("named", ["model.hf_path", "SRC", "WHERE"])
def test_an_adapter_is_no_model_and_says_what_to_name(
    named: str, checkpoint: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """One of peft for a base on the Hub, and a damaged one; in each command that takes a model."""
    monkeypatch.chdir(tmp_path)
    words = {
        "model.hf_path": ["train", "model.hf_path=adapter", "data=chat", "data.path=x.jsonl"],
        "SRC": ["convert", "adapter", "--out", "out"],
        "WHERE": ["generate", "adapter", "Who?"],
    }[named]
    (tmp_path / "adapter").mkdir()
    for content, base in (('{"base_model_name_or_path": "owner/base"}', "'owner/base'"), ("{", "nothing as its base")):
        (tmp_path / "adapter" / "adapter_config.json").write_text(content)
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert f"{named}=adapter: it is an adapter of peft, not a model; its adapter_config.json names {base}" in said
        assert "Name the base" in said and "merge_and_unload" in said


NOTE = (
    "not read: adapter_config.json beside the weights. Only the weights are used, in train, convert, generate and eval"
)


def test_an_adapter_beside_the_weights_is_left_out_everywhere_and_said(
    checkpoint: Path, tmp_path: Path, capsys
) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    # Both ways of peft to say what is adapted, and a base that is not there.
    adapters = {
        "modules": PeftConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False),
        "parameters": PeftConfig(target_parameters=["mlp.experts.down_proj"], init_lora_weights=False),
    }
    words = ["--max-new-tokens", "6", "--text", "the answer"]
    assert cli.main(["generate", str(checkpoint), *words]) == 0
    answer = capsys.readouterr().out
    for name, adapter in adapters.items():
        folder = tmp_path / name
        shutil.copytree(checkpoint, folder)
        adapter.base_model_name_or_path = "nobody/nothing"
        get_peft_model(copy.deepcopy(plain), adapter).save_pretrained(folder)
        assert (folder / "adapter_config.json").is_file()
        adapted = AutoModelForCausalLM.from_pretrained(folder)
        tokens = torch.arange(24)[None]
        assert not torch.equal(adapted(tokens).logits, plain(tokens).logits), "transformers applies it"

        assert cli.main(["generate", str(folder), *words]) == 0
        said = capsys.readouterr()
        assert said.out == answer and said.err.count(f"note: {NOTE}\n") == 1
        model, _ = load_checkpoint(folder)  # of generate and of eval
        assert torch.equal(model(tokens).logits, plain(tokens).logits)

        assert cli.main(["convert", str(folder), "--out", str(tmp_path / f"{name}-copy")]) == 0
        assert capsys.readouterr().out.count(NOTE) == 1
        assert not (tmp_path / f"{name}-copy" / "adapter_config.json").exists()
        copied, given = (load_file(one / "model.safetensors") for one in (tmp_path / f"{name}-copy", folder))
        assert all(torch.equal(copied[key], given[key]) for key in given)

        config = Config(model=model_config_from_hf(folder), moe=MoEConfig(experts="loop"))
        part = build_decoder(config.model, config.moe, torch.float32).to_empty(device="cpu")
        assert NOTE in str(load_hf(part, folder))  # which train prints


@pytest.mark.exhaustive
def test_other_libraries_ask_for_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """A setting of the tokenizer that does not apply, and a kernel that is not installed on some processors."""
    shutil.copytree(checkpoint, tmp_path / "hf")
    file = tmp_path / "hf" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"clean_up_tokenization_spaces": True}))
    words = [str(tmp_path / "hf"), "Who is, there ?", "--max-new-tokens", "3"]
    # As where the kernel is missing: bitsandbytes warns while it is imported.
    script = "import logging, sys; from automoe.generate import main; status = main(sys.argv[1:]); "
    script += "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load CPU'); sys.exit(status)"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("> Who is, there ?\n")
    assert done.stderr == "note: cut off after 3 tokens (--max-new-tokens)\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-new-tokens", "0", "Who?"], "0 is not a number of tokens"),
        (["--seed", "-1", "Who?"], "-1 is not a seed"),
        (["--temperature", "hot", "Who?"], "hot is not a temperature"),
        (["--temperature", "-1", "Who?"], "-1 is not a temperature"),
        (["--temperature", "nan", "Who?"], "nan is not a temperature"),
        (["--text", ""], "an empty prompt asks nothing"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str], says: str, checkpoint: Path, capsys) -> None:
    try:
        status = cli.main(["generate", str(checkpoint), *words])
    except SystemExit as ended:  # argparse's
        status = int(str(ended.code))
    assert status == 2 and says in capsys.readouterr().err


def test_an_answer_is_the_models_up_to_its_last_position(checkpoint: Path, tmp_path: Path, capsys) -> None:
    """Whatever the checkpoint's settings would make less likely."""
    folder = tmp_path / "hf"
    shutil.copytree(checkpoint, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"repetition_penalty": 9.0}))
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 48}))
    speaker = Speaker(folder, 300)
    length = len(speaker.tokenizer("the answer")["input_ids"])
    assert speaker.answer("the answer") == expected(checkpoint, "the answer", 48 - length) != ""
    speaker.answer([{"role": "user", "content": "Who?"}])
    assert "tokens (max_position_embeddings of its config.json)" in capsys.readouterr().err


def test_a_checkpoint_of_nan_answers_nothing(checkpoint: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(["generate", str(folder), "Who?"]) == 2
    assert "numbers are NaN or infinite in model.norm.weight" in capsys.readouterr().err


def test_a_folder_runs_no_code_of_its_own(checkpoint: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for theirs in (
        {"model_type": "theirs", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}},
        {"model_type": "vit", "auto_map": {"AutoModelForImageTextToText": "own.M"}},  # a class without a head
    ):
        (folder / "config.json").write_text(json.dumps(config | theirs))
        monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
        assert cli.main(["generate", str(folder), "Who?"]) == 2
        assert "without custom code" in capsys.readouterr().err and not (tmp_path / "ran").exists()


def test_without_a_tokenizer_nothing_is_asked(checkpoint: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    assert cli.main(["generate", str(folder), "Who?"]) == 2
    err = capsys.readouterr().err
    assert "has no tokenizer" in err and "automoe export RUN" in err  # a run's own folder is a temporary one


def test_a_run_answers_with_its_own_export_once_it_is_done(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").symlink_to(checkpoint)
    with pytest.raises(CheckpointError), checkpoint_of(tmp_path):
        pass
    (tmp_path / "status.json").write_text('{"state": "done"}')
    none = CheckpointConfig(export_hf=False)
    for done in (Config(), Config(plugins=["of_another_machine"]), Config(recipe="upcycle", checkpoint=none)):
        save_config(done, tmp_path)
        with checkpoint_of(tmp_path) as found:
            assert found == tmp_path / "hf"
    # What lies in hf/ is of an earlier start, where this one was to leave none or an adapter.
    for later in (Config(checkpoint=none), Config(lora=LoraConfig(rank=8, export="adapter"))):
        save_config(later, tmp_path)
        with pytest.raises(CheckpointError, match="no weights"), checkpoint_of(tmp_path):
            pass
