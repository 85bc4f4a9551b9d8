"""Rules that do not depend on the mesh: optimizer, data, checkpoints. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import get_args, get_type_hints

from automoe.config.data_schema import TEMPLATE_NAMES, DataConfig, sources_of
from automoe.config.hub import is_data_set, local_folder
from automoe.config.paths import matches
from automoe.config.plugins import registered_names
from automoe.config.rule_engine import Row, Scope, refused, table
from automoe.config.schema import Config

# fmt: off
_OPTIMIZER = table("""
optim.min_lr_ratio > 1 | | a share of optim.lr, at most 1
optim.phases | optim.schedule != phases | phases follow the warm-up if optim.schedule=phases, and it is {optim.schedule}
not optim.phases | optim.schedule == phases | no phases follow the warm-up
optim.qk_clip > 0 | model.attention.qk_norm | norms of queries and keys undo any scale of weights
optim.qk_clip > 0 | lora.rank > 0 | LoRA freezes the projections that QK-clip scales
optim.qk_clip > 0 | train.freeze | train.freeze may freeze projections that QK-clip scales
optim.qk_clip > 0 | optim.master_weights == stochastic | a scale near 1 would round away
optim.qk_clip > 0 | train.compile | compiled attention does not record its logits
optim.qk_clip > 0 | kernels.attention == flex | QK-clip needs a dense mask; flex has none
optim.qk_clip > 0 | parallel.context == ring and mesh.cp > 1 | no rank of a ring has all keys of a row
optim.ema_decay outside 0|1 | | the share of an average that a step keeps, in [0, 1)
    | Set optim.ema_decay=0.999, or 0 for no average
checkpoint.export_ema | optim.ema_decay == 0 | no average of the weights is kept
    | Set optim.ema_decay=0.999, or checkpoint.export_ema=false
optim.moments == bfloat16 | train.dtype != bfloat16 | bfloat16 moments go with bfloat16 products
optim.master_weights == stochastic | train.dtype != bfloat16 | stochastic rounding is to bfloat16
optim.master_weights == stochastic | parallel.grad_sync == micro_batch and mesh.pp == 1
    | gradients that are reduced after each micro-batch would be added up in bfloat16
optim.momentum outside 0|1 | | a share that a step keeps, in [0, 1)
optim.master_weights == stochastic | optim.algorithm == muon | Muon updates float32 weights
optim.moments == bfloat16 | optim.algorithm == muon | Muon's momentum is float32
""")
_DATA = table("""
observe.samples | train.val_every == 0 | they are answered after validations, and there are none
data.val_fraction outside 0|1 | | a share of the text in [0, 1)
data.val_fraction == 0 | train.val_every > 0
    | train.val_every={train.val_every} validates, and no text is set aside for it
data.path != null | data.sources | data.sources are read instead of it
    | Add it as one of the sources, or leave one of them out
data.tokenizer == none | not data.is_synthetic | data.kind={data.kind} is text, which a tokenizer turns into ids
    | Set data.tokenizer=byte, or leave it out
data.tokenizer != null|none | data.is_synthetic
    | data.kind={data.kind} has no text: its ids are drawn from model.vocab_size
lora.export == adapter | data.is_synthetic and lora.rank > 0
    | data.kind={data.kind} trains nothing that should be loaded as an adapter
""")
_CHAT = table("""
data.kind: data.is_preference | recipe == pretrain|finetune | it learns every answer it reads, rejected ones too
    | Set recipe=dpo
data.on_long == truncate | data.is_preference | an answer without its end cannot be compared
    | Set data.on_long=drop, or error
not data.document_mask | data.is_preference
    | both sequences of a pair share a row, and one must not see the other
data.on_long == drop|truncate | not data.is_chat | this is for conversations, and data.kind={data.kind} is text
    | Set data.on_long=split, or error
data.on_long == split | data.is_chat | half a conversation answers no question, so none is split
    | Set data=chat (or data.on_long=error), data.on_long=drop or data.on_long=truncate
not data.document_mask | data.is_chat and data.chat.pack | samples that share a row attend only to themselves
""")
_CHECKPOINT = table("""
checkpoint.keep_every % checkpoint.every | checkpoint.every > 0
    | checkpoints are written at multiples of checkpoint.every={checkpoint.every}
checkpoint.keep_every > 0 | checkpoint.every == 0 and checkpoint.saves | checkpoint.every_minutes saves any step
checkpoint.keep_every > 0 | checkpoint.every == 0 | no checkpoints are written: checkpoint.every=0
""")


def settings_rows(config: Config) -> Iterator[Row]:
    """Yield the rules that do not depend on the mesh: optimizer, data, checkpoints."""
    see = Scope(config, config.mesh)
    for i, beta in enumerate(config.optim.betas):
        yield "optim.betas", not 0 <= beta < 1, f"beta {i + 1} is {beta}, outside [0, 1)", "Set [0.9,0.95]"
    yield from refused(see, _OPTIMIZER)
    yield from _phase_rows(config)
    yield from refused(see, _DATA)
    yield from _source_rows(config)
    yield from refused(see, _CHAT)
    data = config.data
    alpaca = data.is_preference and any(source.chat.format == "alpaca" for _, _, source in sources_of(data))
    yield ("data.chat.format", alpaca, "pairs have a prompt, chosen and rejected: text, or "
           "messages of role and content (messages) or of from and value (sharegpt)",
           "Set data.chat.format=messages, and data.chat.keys={prompt: instruction} for other names")
    taken = TEMPLATE_NAMES.intersection(data.chat.template_args or ())
    yield ("data.chat.template_args", bool(taken), f"the trainer gives {', '.join(sorted(taken))} to the template itself",
           "Leave it out; tools are a record's tools")
    dated = re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d", data.chat.date or "2026-11-23")
    yield "data.chat.date", data.is_chat and not dated, "it is not a date", "Write it as 2026-11-23"
    yield from checkpoint_rows(config)


def _phase_rows(config: Config) -> Iterator[Row]:
    optim, phases, key = config.optim, config.optim.phases, "optim.phases"
    after, total = config.train.steps - optim.warmup_steps, sum(phase.steps for phase in phases)
    yield (key, bool(phases) and not config.train.epochs and total != after,
           f"phases take the steps after the warm-up, train.steps - optim.warmup_steps = {after}, and their "
           f"steps sum to {total}", f"Set train.steps={total + optim.warmup_steps} train.epochs=0, or other steps")
    for number, phase in enumerate(phases, 1):
        yield (key, phase.bias_update_rate is not None and not config.model.router.expert_bias,
               "a phase has a bias_update_rate, and the routers have no biases to update (model.router.expert_bias=false)",
               "Leave it out")
        yield (key, phase.mtp_loss_weight is not None and not config.model.num_mtp_layers,
               "a phase has an mtp_loss_weight, and there are no modules for multi-token prediction",
               "Set model.num_mtp_layers=1, or leave it out")
        rates = phase.lr_ratio, phase.bias_update_rate or 0, phase.mtp_loss_weight or 0
        yield (key, phase.steps < 1 or not all(0 <= rate < inf for rate in rates),
               f"phase {number} has steps={phase.steps}, lr_ratio={phase.lr_ratio}, bias_update_rate="
               f"{phase.bias_update_rate}, mtp_loss_weight={phase.mtp_loss_weight}; a phase has at least one step and no "
               "rate or weight below 0", "Correct that phase")


def _source_rows(config: Config) -> Iterator[Row]:
    data, hf_path, here = config.data, config.model.hf_path, os.getcwd()
    sources = sources_of(data)
    names = [name for name, _, _ in sources]
    kinds = (*get_args(get_type_hints(DataConfig)["kind"]), *registered_names("data.kind"))
    yield ("data.sources", len(set(names)) < len(names) or (bool(data.sources) and "" in names),
           f"sources are told apart by name, and they are called {', '.join(names)}", "Give each a name: {name: code}")
    for name, weight, source in sources:
        key, said = ("data.sources", f"{name}: ") if data.sources else ("data.path", "")
        path, kind = source.path, source.kind
        made = kind.startswith("stdlib") or source.is_synthetic
        hub = path is not None and (kind == "hub" or source.is_chat and is_data_set(path))
        part = [name for name, asked in (("split", source.split != "train"), ("subset", source.subset is not None)) if asked]
        for wrong, rule, remedy in (
            (not 0 < weight < inf, f"weight={weight}: a share of the rows, larger than 0",
             "Set its weight, or leave the source out"),
            (kind not in kinds, f"kind={kind} is not known", f"Available: {', '.join(kinds)}"),
            ((source.is_chat, source.is_preference) != (data.is_chat, data.is_preference),
             f"kind={kind}, and data.kind={data.kind}: conversations, pairs and text cannot be mixed",
             "Set data=chat for conversations, data=preference for pairs, and give other sources no kind"),
            (source.is_synthetic and bool(data.sources), f"kind={kind} is synthetic, not text",
             "Set data=benchmark without sources"),
            (made and path is not None, f"data.path is set and data.kind={kind} does not read it",
             "Set data=text|jsonl|parquet|chat, or leave data.path out"),
            (not made and path is None, f"data.kind={kind} reads files, and no path is given",
             "Set data.path=FILE, or data=stdlib"),
            (not (path is None or hub or matches(path)), f"nothing there{f': {path}' * bool(said)} (looked from {here})",
             "Name a file, a directory or a glob that exists"),
            (bool(part) and not hub, f"{', '.join(part)}: this is for data sets of the Hub, and files are read whole",
             "Leave it out, and name only the files to read"),
            (not data.is_chat and source.chat != data.chat, "format, keys and roles are for conversations",
             "Leave them out; data.text_key names the text"),
        ):
            yield key, wrong, said + rule, remedy
    yield ("model.hf_path", hf_path is not None and not local_folder(hf_path).is_dir(),
           f"no such directory (looked from {here})",
           "Name a directory with config.json and *.safetensors, or a Hub id (OWNER/NAME@main), or set null")


def checkpoint_rows(config: Config) -> Iterator[Row]:
    """Yield the rules of ``checkpoint``: where to resume from and which steps to keep."""
    checkpoint = config.checkpoint
    every = checkpoint.every
    val_every = config.train.val_every
    yield ("checkpoint.resume",
           checkpoint.resume not in ("auto", "never") and not Path(checkpoint.resume).expanduser().is_dir(),
           f"no such directory (looked from {os.getcwd()})",
           "Set auto, never, or the run or step directory to start from")
    yield from refused(Scope(config, config.mesh), _CHECKPOINT)
    yield ("checkpoint.keep_best", checkpoint.keep_best > 0 and (not every or not val_every or every % val_every != 0),
           "the validation loss says which is best, so every saved step must be validated: "
           f"checkpoint.every={every} is not a multiple of train.val_every={val_every}",
           f"Set train.val_every={every or 100} checkpoint.every={every or 100}, or checkpoint.keep_best=0")
