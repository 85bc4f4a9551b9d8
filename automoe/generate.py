"""``automoe generate WHERE [PROMPT ...]``: generate text from a run through ``transformers``.

automoe generate runs/sft_small "What is the function json.dumps for?"
automoe generate runs/sft_small                       # chat in the terminal; an empty line ends it
automoe generate runs/default --text "def main():"    # continue a text, without a chat template
"""

from __future__ import annotations

import argparse
import codecs
import io
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from automoe.config.frozen import CONFIG_FILE, flat, read_mapping
from automoe.config.paths import user_path
from automoe.config.schema import Config, export_name
from automoe.data.chat import are_functions
from automoe.errors import (
    AutomoeError,
    CheckpointError,
    exit_status,
    listed,
    number_option,
    one_line,
    say,
    spelled_out,
)
from automoe.launch.run_dir import read_status
from automoe.storage.files import read_file
from automoe.storage.foreign import parse_json, read_settings
from automoe.storage.guarded import guarded, limited_memory

# Keys of generation_config.json that answers follow, and keys that this command sets itself.
FOLLOWED = set(
    "bos_token_id eos_token_id pad_token_id do_sample temperature top_k top_p min_p typical_p "
    "repetition_penalty no_repeat_ngram_size".split()
)
_OVERRIDDEN = set(
    "max_length max_new_tokens transformers_version use_cache _from_model_config".split()
)

# Loggers whose warnings need no action of the user: kernels that are neither installed nor needed,
# a setting of the tokenizer that does not apply.
_NOISY = ("transformers.integrations.hub_kernels", "transformers.tokenization_utils_tokenizers")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="automoe generate",
        description="Ask a model what it learned. Without a prompt, chat in the terminal: an empty line ends it.",
    )
    parser.add_argument(
        "where", help="run directory, or a HuggingFace checkpoint: a directory, or a Hub id"
    )
    parser.add_argument("prompt", nargs="*", help="a question; several are asked one by one")
    parser.add_argument(
        "--text",
        action="store_true",
        help="continue the prompts as they are, without a chat template",
    )
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="system prompt of every question"
    )
    parser.add_argument(
        "--tools",
        type=number_option(
            lambda path: parse_json(read_file(Path(path).expanduser())),
            are_functions,
            "file with a JSON list of tools",
        ),
        metavar="FILE",
        help="JSON list of the tools that the model may call, as in training",
    )
    parser.add_argument(
        "--template-args",
        type=number_option(json.loads, lambda value: isinstance(value, dict), "JSON object"),
        default={},
        metavar="JSON",
        help="""arguments of the chat template, such as '{"enable_thinking": false}'""",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=number_option(int, lambda number: number > 0, "number of tokens, 1 or more"),
        default=256,
        metavar="N",
        help="longest answer in tokens (default: 256)",
    )
    parser.add_argument(
        "--temperature",
        type=number_option(
            float,
            lambda number: number == 0 or 1e-6 <= number < inf,  # logits over it are finite
            "temperature: 0, or 0.000001 or more",
        ),
        default=0.0,
        help="0: the likeliest token each time (default)",
    )
    seed = number_option(int, lambda number: 0 <= number < 2**32, "seed: 0 to 4294967295")
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed of sampling with a temperature (default: 0)"
    )
    return parser


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Answer the prompts in ``argv`` or from standard input.

    Returns the exit status: 0, or 2 if there is no model to load or a prompt cannot be answered.
    """
    parser = _parser()
    args = parser.parse_intermixed_args(argv)  # options may stand between the run and its questions
    variables = args.template_args | {"tools": args.tools}
    if args.text and (args.tools or args.template_args):
        parser.error("--text uses no chat template: leave out --tools and --template-args")
    "".join([*args.prompt, args.system]).encode()  # refuses what is not UTF-8
    with checkpoint_of(user_path("WHERE", args.where)) as folder:
        speaker = Speaker(folder, args.max_new_tokens, args.temperature, args.seed, variables)
        system = [{"role": "system", "content": args.system}] if args.system else []
        for prompt in args.prompt:
            if not prompt:
                raise CheckpointError("an empty prompt asks nothing. Write some text")
            said = prompt if args.text else [*system, {"role": "user", "content": prompt}]
            answer = spelled_out(speaker.answer(said))
            print(f"{prompt}{answer}" if args.text else f"> {prompt}\n{answer}")
        if args.prompt:
            return 0
        messages = list(system)
        for line in _lines():
            if args.text:
                print(f"{line}{spelled_out(speaker.answer(line))}", flush=True)
                continue
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": speaker.answer(messages)})
            print(spelled_out(messages[-1]["content"]), flush=True)
    return 0


def _lines() -> Iterator[str]:
    """Yield the non-empty lines of standard input.

    In a terminal, an empty line ends the input.
    """
    typed = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        # PYTHONIOENCODING=ascii is meant for the output: read a pipe as UTF-8 all the same.
        ascii_alone = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if ascii_alone else None, errors="strict")
    with suppress(EOFError):
        while (line := input("> " if typed else "").strip()) or not typed:
            if line:
                yield line


@contextmanager
def checkpoint_of(where: Path) -> Iterator[Path]:
    """Context that yields the HuggingFace checkpoint folder of a run, a checkpoint or a Hub id.

    A finished run has its own checkpoint in ``hf/``. For any other run, a checkpoint is exported to
    a temporary folder, which is removed on exit.

    Args:
        where: run directory, checkpoint directory or Hub id.

    Raises:
        CheckpointError, ConfigError: ``where`` is none of these, or the run has no weights.
    """
    from automoe.hf.families.registry import read_hf_config
    from automoe.hf.headers import ADAPTER
    from automoe.hf.identity import checkpoint_folder

    done = read_status(where).get("state") == "done"
    if (where / "config.json").is_file():
        yield where
    elif done and (where / "hf" / "config.json").is_file() and _wrote_a_model(where):
        yield where / "hf"  # `_wrote_a_model` rules out an hf/ from an earlier start of the run
    elif not where.exists() and (folder := checkpoint_folder(where, "WHERE")) != where:
        yield folder
    elif not (where / "config.yaml").is_file():
        if (where / ADAPTER).is_file():
            read_hf_config(where, "WHERE")  # which says what to do with it
        raise CheckpointError(
            f"{where} is neither a run directory (config.yaml) nor a HuggingFace checkpoint (config.json). Name one"
        )
    else:
        from automoe.export import export_run

        with tempfile.TemporaryDirectory() as scratch:
            say(f"the newest weights of {where}:")
            export_run(where, Path(scratch, "hf"))
            yield Path(scratch, "hf")


def _wrote_a_model(run_dir: Path) -> bool:
    """Return True if, by its configuration, a run writes a HuggingFace checkpoint to ``hf/``.

    Its config.yaml is read without the schema, so the run's plugins and environment are not needed.
    If it cannot be read, the result is True.
    """
    with suppress(OSError, ValueError):
        values = flat(read_mapping(read_file(run_dir / CONFIG_FILE)))
        config = Config(recipe=values.get("recipe", ""))
        config.checkpoint.export_hf = values.get("checkpoint.export_hf", True)
        config.lora.rank = values.get("lora.rank") or 0
        config.lora.export = values.get("lora.export", config.lora.export)
        return export_name(config) == "hf"
    return True


def load_checkpoint(folder: Path) -> tuple[Any, Any]:
    """Load model and tokenizer of a HuggingFace checkpoint, onto the first GPU if there is one.

    No code of the checkpoint is run (``trust_remote_code=False``).

    Raises:
        CheckpointError: the checkpoint has no tokenizer, is damaged, has parameters that are NaN or
            infinite, or ``transformers`` cannot load it without the checkpoint's own code.
        ConfigError: config.json describes a model much larger than the checkpoint's files.
        DataError: building the model, or its first forward pass, takes too long or too much memory.
    """
    import torch
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from automoe.data.tokenizer_files import check_files
    from automoe.hf.families.registry import check_model
    from automoe.hf.headers import check_numbers, read_headers, unread_adapter, without_adapter
    from automoe.hf.transformers_models import loading_class, num_parameters, stated_config

    disable_progress_bar()
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for note in unread_adapter(folder):
        say(f"note: {note}")
    # The folder is untrusted: check it before loading anything.
    tensors = read_headers(folder, last=True)
    check_model(folder)
    check_files(folder)
    if not any(
        (folder / f"tokenizer{end}").is_file() for end in (".json", "_config.json", ".model")
    ):
        raise CheckpointError(
            f"{folder} has no tokenizer, as after training on data=benchmark. Copy the files of its tokenizer "
            "into the checkpoint; export a run first (automoe export RUN --out DIR)"
        )
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = stated_config(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, **safe)
        # Tensors that no file holds would be drawn at random, in memory for all of them.
        built = partial(num_parameters, config)
        check_numbers(folder, guarded(f"{folder}: its class of transformers", built), tensors)
        with without_adapter(folder) as plain:
            model, loaded = loading_class(config).from_pretrained(
                plain,
                config=config,
                dtype="auto",
                output_loading_info=True,
                use_safetensors=True,
                generation_config=_generation_config(folder),
                **safe,
            )
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        # A chunk of a state space model, which config.json sets, is computed whole for two tokens.
        with torch.inference_mode(), limited_memory(f"{folder}: a forward pass of its model"):
            logits = model(torch.zeros(1, 2, dtype=torch.long, device=model.device)).logits
    except AutomoeError:
        raise
    except Exception as error:  # the folder's content may make transformers raise any error
        why = one_line(f"{type(error).__name__}: {error}")
        raise CheckpointError(
            f"{folder}: transformers cannot load it without custom code, or run it ({why})"
        ) from error
    _check_loaded(folder, model, loaded, logits)
    return model, tokenizer


def _check_loaded(folder: Path, model: Any, loaded: dict[str, Any], logits: Any) -> None:
    """Raise ``CheckpointError`` if a loaded model lacks parameters, or has NaN or infinite numbers.

    Print a note if the checkpoint has tensors that the model did not read.

    Args:
        loaded: transformers' loading info, with missing and unexpected keys.
        logits: logits of a first forward pass.
    """
    from automoe.hf.read import is_finite

    if missing := loaded["missing_keys"]:  # transformers draws them at random
        raise CheckpointError(
            f"{folder}: its files lack {len(missing)} tensors of {type(model).__name__}: {listed(missing)}. Compare its "
            "config.json with the published one, and copy the missing files"
        )
    if unread := loaded["unexpected_keys"]:
        say(f"note: {folder}: not read: {listed(unread)}")
    # NaN logits would go unnoticed: argmax takes the first token, so the model still answers and
    # still gets a share of multiple choices right.
    if odd := [
        name
        for name, p in model.named_parameters()
        if p.is_floating_point() and p.element_size() > 1 and not is_finite(p.detach())
    ]:
        raise CheckpointError(
            f"{folder}: numbers are NaN or infinite in {listed(odd)}. Use another checkpoint"
        )
    if not is_finite(logits):
        raise CheckpointError(
            f"{folder}: the logits of its model are NaN or infinite. Compare its config.json with the published one"
        )


def _generation_config(folder: Path) -> Any:
    """Return a checkpoint's sampling settings that automoe follows, as transformers' GenerationConfig.

    They are the keys ``FOLLOWED`` (special tokens, temperature, top-k, top-p, penalties ...) of
    generation_config.json, or of config.json if there is no such file. Print a note on other
    settings in generation_config.json.
    """
    from transformers import GenerationConfig

    name = "generation_config.json"
    if not (folder / name).is_file():
        name = "config.json"
    stored = read_settings(folder, name)
    settings = GenerationConfig(**{key: stored[key] for key in FOLLOWED & stored.keys()})
    others = {key for key in settings.to_dict() if stored.get(key)} - FOLLOWED - _OVERRIDDEN
    if others and name != "config.json":
        say(f"note: {folder / name}: settings not followed: {listed(others, 20)}")
    return settings


class Speaker:
    """Model and tokenizer of a HuggingFace checkpoint, which answer prompts.

    Args:
        folder: checkpoint directory.
        max_new_tokens: largest number of tokens of an answer.
        temperature: sampling temperature; 0 always takes the likeliest token.
        seed: seed of sampling; without effect at temperature 0.
        variables: extra variables of the chat template, such as ``tools``.
    """

    def __init__(
        self,
        folder: Path,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        import torch

        torch.manual_seed(seed)
        self.folder = folder
        self.given = variables or {}
        self.model, self.tokenizer = load_checkpoint(folder)
        self.max_new_tokens = max_new_tokens
        # Greedy means the model's likeliest token: switch off the penalties that the checkpoint's
        # generation_config.json may set.
        self.options: dict[str, Any] = (
            {"do_sample": True, "temperature": temperature}
            if temperature
            else {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
        )

    def answer(self, said: str | list[dict[str, Any]]) -> str:
        """Return the continuation of a text, or the answer to chat messages, without stop token.

        Print a note if the answer to messages was cut off at its largest length.

        Args:
            said: a text to continue, or chat messages with ``role`` and ``content``.

        Raises:
            CheckpointError: the tokenizer has no chat template for messages, or the prompt leaves
                no position of ``max_position_embeddings`` for an answer.
        """
        import torch

        prompt = guarded(f"{self.folder}: tokenizer or chat template", lambda: self._ids(said))
        ids = torch.tensor([prompt], dtype=torch.long, device=self.model.device)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        length = len(prompt)
        if longest and length >= longest:
            raise CheckpointError(
                f"the prompt has {length} tokens, and the model has {longest} positions "
                "(max_position_embeddings of its config.json). Ask something shorter, or begin a new chat"
            )
        most = self.max_new_tokens
        limit = "--max-new-tokens"
        # Stop at the last position that the model was trained at.
        if longest and longest - length < most:
            most = longest - length
            limit = "max_position_embeddings of its config.json"
        padding = self.tokenizer.pad_token_id
        answer = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **self.options,
            max_new_tokens=most,
            pad_token_id=padding,
        )
        ids = answer[0, length:]
        stops = self.model.generation_config.eos_token_id
        ended = int(ids[-1]) in (stops if isinstance(stops, list) else [stops])
        if len(ids) == most and not ended and not isinstance(said, str):
            say(f"note: cut off after {most} tokens ({limit})")
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _ids(self, said: str | list[dict[str, Any]]) -> list[int]:
        if isinstance(said, str):
            # As in pretraining: keep the BOS that the tokenizer puts before a text, but no EOS
            # after it.
            first = [
                i for i in self.tokenizer("")["input_ids"][:1] if i == self.tokenizer.bos_token_id
            ]
            return first + self.tokenizer(said, add_special_tokens=False)["input_ids"]
        if self.tokenizer.chat_template is None:
            raise CheckpointError(
                "its tokenizer has no chat template. Use --text, which continues a text as it is"
            )
        try:
            return self.tokenizer.apply_chat_template(
                said, add_generation_prompt=True, return_dict=True, **self.given
            )["input_ids"]
        except MemoryError:
            raise
        except Exception as error:  # the expressions of a template may raise any error
            raise CheckpointError(
                f"{self.folder}: its chat template refuses this conversation "
                f"({type(error).__name__}: {error}). Use --text, or correct chat_template"
            ) from error


if __name__ == "__main__":
    sys.exit(main())
