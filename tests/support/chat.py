"""Small tokenizers with chat templates that behave as those of the families do, and conversations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|tool|>"]
ADDED = ["<think>", "</think>", "<call>", "</call>"]  # not special: generated text has them

_CHATML_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments | tojson + '</call>' }}{% endfor %}"

TEMPLATES = {
    # Qwen2.5: every turn ends in a stop token and a line end.
    "chatml": "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}" + _CHATML_PROMPT,
    # Qwen3: reasoning is written in the last answer alone; so is its frame, empty or not.
    "thinks": "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.last %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content }}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}{% else %}"
    + _CHATML_TURN
    + "{% endif %}{% endfor %}"
    + _CHATML_PROMPT,
    # GLM-4.5: nothing ends an answer but the token that opens the next turn.
    "opens": "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    # Mistral: the system prompt goes along with the last message, if that is a question.
    "moves": "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}"
    "{% elif m.role == 'user' %}{{ '[INST]' + (ns.system if loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    # DeepSeek-R1: the generation prompt opens the reasoning, which no written answer has.
    "prefills": "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
    # GPT-OSS: the last answer ends in another token than those before it.
    "returns": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}" + _CHATML_PROMPT,
    # Phi-3: the conversation is closed by a token of its own, behind the last turn's.
    "closes": "{% for m in messages %}"
    + _CHATML_TURN
    + "{% endfor %}"
    + _CHATML_PROMPT.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}"),
    # A line of text behind every turn, and another at the end.
    "signs": "{% for m in messages %}"
    + _CHATML_TURN
    + "{{ '--\\n' }}{% endfor %}"
    + _CHATML_PROMPT.replace("{% endif %}", "{% else %}{{ 'The end.\\n' }}{% endif %}"),
    # Command-R: two tokens end an answer.
    "two": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|tool|><|im_end|>' }}{% endfor %}"
    + _CHATML_PROMPT,
    # No special token at all.
    "bare": "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    # DeepSeek-V3: arguments are text, and a call is written where there is no content alone.
    "text_calls": "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + c.function.arguments + '</call>' }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
}


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Line ends and blanks that merge, so that a prompt's end and an answer's beginning can.
    texts = ["\n\n\n\n", "the answer is the question", " a b c", "user assistant system"] * 50
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return tokenizer.to_str()


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """A byte-level tokenizer of 300 ids with the ``template`` of that name, or with none."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    return folder


def messages(*turns: str) -> list[dict[str, Any]]:
    """``user``, ``assistant``, ``user``, ... in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]


def write_chat(path: Path, conversations: list[list[dict[str, Any]]]) -> Path:
    """One conversation a line."""
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    return path


def a_row_each(path: Path, num_rows: int) -> tuple[str, ...]:
    """Overrides of a run whose epoch has ``num_rows`` rows: so many conversations, a row each and none for validation."""
    write_chat(path, [messages(f"{n}?", f"{n} and {n}.") for n in range(num_rows)])
    plain = ("data.chat.template=plain", "data.chat.pack=false", "data.val_fraction=0")
    return ("data=chat", f"data.path={path}", *plain)
