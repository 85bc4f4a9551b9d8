"""``automoe generate WHERE [PROMPT ...]``: ask what was trained, through ``transformers``.

automoe generate runs/sft_small "What is the function json.dumps for?"
automoe generate runs/sft_small                       # a chat in the terminal, until an empty line or Ctrl-D
automoe generate runs/default --text "def main():"    # goes on with the text, for models that know no chat
"""

from __future__ import annotations

import argparse
import codecs
import io
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from automoe.config.frozen import CONFIG_FILE, flat, read_mapping
from automoe.errors import CheckpointError, exit_status, listed, spelled_out
from automoe.launch.run_dir import read_status


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Answer what ``argv`` asks; returns the exit status (2: there is nothing to ask)."""
    parser = argparse.ArgumentParser(
        prog="automoe generate",
        description="Ask a model what it learned. Without a prompt, a chat in the terminal: an empty line ends it.",
    )
    parser.add_argument(
        "where", help="run directory, or a HuggingFace checkpoint: a directory, or a Hub id"
    )
    parser.add_argument("prompt", nargs="*", help="a question; several are asked one by one")
    parser.add_argument(
        "--text",
        action="store_true",
        help="go on with the prompts as they are, without chat template",
    )
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="system prompt of every question"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=_at_least_one,
        default=256,
        metavar="N",
        help="of an answer (default: 256)",
    )
    parser.add_argument(
        "--temperature",
        type=_not_negative,
        default=0.0,
        help="0: the likeliest token each time (default)",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, help="of drawing tokens, with a temperature (default: 0)"
    )
    args = parser.parse_intermixed_args(argv)  # options may stand between the run and its questions
    with checkpoint_of(Path(args.where).expanduser()) as folder:
        speaker = Speaker(folder, args.max_new_tokens, args.temperature, args.seed)
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
    """Lines typed, until an empty one; or those of a pipe, where an empty one says nothing."""
    typed = sys.stdin.isatty()
    if typed:
        print("> ", end="", flush=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # PYTHONIOENCODING=ascii says nothing of a pipe
        ascii_alone = codecs.lookup(sys.stdin.encoding).name == "ascii"
        # What is not UTF-8 is an error for people in ``answer``.
        sys.stdin.reconfigure(encoding="utf-8" if ascii_alone else None, errors="surrogateescape")
    for line in sys.stdin:
        if line := line.strip():
            yield line
        elif typed:
            return
        if typed:
            print("> ", end="", flush=True)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens, 1 or more")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is no seed: 0 to 4294967295")
    return int(text)


def _not_negative(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text} is no temperature: 0 or more")


@contextmanager
def checkpoint_of(where: Path) -> Iterator[Path]:
    """The HuggingFace checkpoint ``where``, or of that Hub id; of a run its own when it is done,
    else one made now.

    Raises:
        CheckpointError, ConfigError: there is none, and no weights to make one of.
    """
    from automoe.hf.identity import checkpoint_folder

    done = read_status(where).get("state") == "done"
    if (where / "config.json").is_file():
        yield where
    elif done and (where / "hf" / "config.json").is_file() and _wrote_a_model(where):
        yield where / "hf"  # not of an earlier start, after which this one left no model
    elif not where.exists() and (folder := checkpoint_folder(where, "WHERE")) != where:
        yield folder
    elif not (where / "config.yaml").is_file():
        raise CheckpointError(
            f"{where} is neither a run directory (config.yaml) nor a HuggingFace checkpoint (config.json). Name one"
        )
    else:
        from automoe.export import export_run

        with tempfile.TemporaryDirectory() as scratch:
            print(f"the newest weights of {where}:", file=sys.stderr, flush=True)
            export_run(where, Path(scratch, "hf"))
            yield Path(scratch, "hf")


def _wrote_a_model(run_dir: Path) -> bool:
    """Whether the run's last start was to write ``hf/``. Its plugins and environment are not needed
    to say that."""
    with suppress(OSError, ValueError):
        values = flat(read_mapping((run_dir / CONFIG_FILE).read_bytes()))
        adapter = values.get("lora.rank") and values.get("lora.export") == "adapter"
        return values.get("checkpoint.export_hf", True) and not adapter
    return True


def load_checkpoint(folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a HuggingFace checkpoint, on the first GPU if there is one.
    Runs no code of it.

    Raises:
        CheckpointError: it has no tokenizer, is damaged, has numbers that are not finite, or
            ``transformers`` cannot load it without code of its own.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from automoe.hf.headers import read_headers
    from automoe.hf.read import is_finite

    disable_progress_bar()
    read_headers(folder)  # a stranger's folder: refused before anything of it is loaded
    if not any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        raise CheckpointError(
            f"{folder} has no tokenizer. Copy the files of the one that trained it into it"
        )
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", use_safetensors=True, **safe
        )
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: transformers cannot load it without code of its own ({why})"
        ) from error
    # With logits that are NaN the first token is the likeliest: an answer all the same, and a share
    # of right choices.
    named = (
        (name, p.detach())
        for name, p in model.named_parameters()
        if p.is_floating_point() and p.element_size() > 1
    )
    if odd := [name for name, parameter in named if not is_finite(parameter)]:
        raise CheckpointError(
            f"{folder}: numbers are NaN or infinite in {listed(odd)}. Take another checkpoint"
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


class Speaker:
    """A checkpoint that answers.

    Args:
        temperature: 0 takes the likeliest token.
        seed: of the tokens that are drawn otherwise.
    """

    def __init__(
        self, folder: Path, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> None:
        from transformers import set_seed

        set_seed(seed)
        self.model, self.tokenizer = load_checkpoint(folder)
        # The likeliest token is that of the model, whatever the checkpoint's own settings would
        # make less likely.
        greedy = {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
        drawn = {"do_sample": True, "temperature": temperature} if temperature else greedy
        self.options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        self.options |= drawn

    def answer(self, said: str | list[dict[str, Any]]) -> str:
        """What comes after a text, or the answer to messages, without its stop token.

        Raises:
            CheckpointError: messages, and the tokenizer has no chat template; a prompt that is no
                text, or too long.
        """
        from transformers import BatchEncoding

        try:
            (said if isinstance(said, str) else "".join(one["content"] for one in said)).encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                "the prompt is not UTF-8. Convert it (iconv -f latin1 -t utf-8)"
            ) from error
        if isinstance(said, str):
            # As the model's pretraining: what its tokenizer puts before a text, and nothing behind
            # it.
            first = [
                i for i in self.tokenizer("")["input_ids"][:1] if i == self.tokenizer.bos_token_id
            ]
            ids = first + self.tokenizer(said, add_special_tokens=False)["input_ids"]
            inputs = BatchEncoding(
                {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}, tensor_type="pt"
            )
        elif self.tokenizer.chat_template is None:
            raise CheckpointError(
                "its tokenizer has no chat template. Use --text, which goes on with a text as it is"
            )
        else:
            inputs = self.tokenizer.apply_chat_template(
                said, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        inputs = inputs.to(self.model.device)
        longest, length = (
            getattr(self.model.config, "max_position_embeddings", None),
            inputs["input_ids"].shape[1],
        )
        if longest and length >= longest:
            raise CheckpointError(
                f"a prompt of {length} tokens, and the model knows {longest} positions "
                "(max_position_embeddings of its config.json). Ask something shorter, or begin a new chat"
            )
        most, limit = self.options["max_new_tokens"], "--max-new-tokens"
        # behind it are positions that no token was ever trained at
        if longest and longest - length < most:
            most, limit = longest - length, "max_position_embeddings of its config.json"
        ids = self.model.generate(**inputs, **self.options | {"max_new_tokens": most})[0, length:]
        stops = self.model.generation_config.eos_token_id
        ended = int(ids[-1]) in (stops if isinstance(stops, list) else [stops])
        if len(ids) == most and not ended and not isinstance(said, str):
            print(f"note: cut off after {most} tokens ({limit})", file=sys.stderr, flush=True)
        return self.tokenizer.decode(ids, skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
