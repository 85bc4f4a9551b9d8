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
from automoe.config.recipe_args import GRPOArgs
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
optim.qk_clip > 0 | model.attention.kind == compressed | all heads share a key, which is their value too
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
observe.samples | train.val_every == 0 and not facts.prompts | they are answered after validations, and there are none
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
data.chat.format: facts.alpaca | | pairs have a prompt, chosen and rejected: text, or messages of role and content
    (messages) or of from and value (sharegpt)
    | Set data.chat.format=messages, and data.chat.keys={prompt: instruction} for other names
data.chat.template_args: facts.taken | | the trainer gives {facts.taken} to the template itself
    | Leave it out; tools are a record's tools
data.chat.date: not facts.dated | data.is_chat | it is not a date | Write it as 2026-11-23
""")
_PHASES = table("""
optim.phases: facts.steps != facts.after | train.epochs == 0
    | phases take the steps after the warm-up, train.steps - optim.warmup_steps = {facts.after}, and their steps sum to
    {facts.steps} | Set train.steps={facts.total} train.epochs=0, or other steps
""")
_PHASE = table("""
optim.phases: facts.phase.bias_update_rate != null | not model.router.expert_bias
    | a phase has a bias_update_rate, and the routers have no biases to update | Leave it out
optim.phases: facts.phase.mtp_loss_weight != null | model.num_mtp_layers == 0
    | a phase has an mtp_loss_weight, and there are no modules for multi-token prediction
    | Set model.num_mtp_layers=1, or leave it out
optim.phases: facts.wrong | | phase {facts.number} is {facts.phase}; a phase has at least one step and no rate or weight
    below 0 | Correct that phase
""")
_SOURCE = """
KEY: not facts.weighs | | SAID weight={facts.weight}: a share of the rows, larger than 0
    | Set its weight, or leave the source out
KEY: facts.kinds | | SAID kind={facts.kind} is not known | Available: {facts.kinds}
KEY: facts.mixed | | SAID kind={facts.kind}, and data.kind={data.kind}: conversations, pairs and text cannot be mixed
    | Set data=chat for conversations, data=preference for pairs, and give other sources no kind
KEY: facts.synthetic | data.sources | SAID kind={facts.kind} is synthetic, not text
    | Set data=benchmark without sources
KEY: facts.path != null | facts.made | SAID data.path is set and data.kind={facts.kind} does not read it
    | Set data=text|jsonl|parquet|chat, or leave data.path out
KEY: facts.path == null | not facts.made | SAID data.kind={facts.kind} reads files, and no path is given
    | Set data.path=FILE, or data=stdlib
KEY: facts.missing | | SAID nothing there: {facts.path} (looked from {facts.here})
    | Name a file, a directory or a glob that exists
KEY: facts.parts | not facts.hub | SAID {facts.parts}: this is for data sets of the Hub, and files are read whole
    | Leave it out, and name only the files to read
KEY: facts.talks | not data.is_chat | SAID format, keys and roles are for conversations
    | Leave them out; data.text_key names the text
"""
_ALONE = table(_SOURCE, KEY="data.path", SAID="")
_AMONG = table(_SOURCE, KEY="data.sources", SAID="{facts.name}:")
_CHECKPOINT = table("""
checkpoint.resume: facts.gone | | no such directory (looked from {facts.here})
    | Set auto, never, or the run or step directory to start from
checkpoint.keep_every % checkpoint.every | checkpoint.every > 0
    | checkpoints are written at multiples of checkpoint.every={checkpoint.every}
checkpoint.keep_every > 0 | checkpoint.every == 0 and checkpoint.saves | checkpoint.every_minutes saves any step
checkpoint.keep_every > 0 | checkpoint.every == 0 | no checkpoints are written: checkpoint.every=0
checkpoint.keep_best > 0 | facts.unvalidated
    | the validation loss says which is best, so every saved step must be validated:
    checkpoint.every={checkpoint.every} is not a multiple of train.val_every={train.val_every}
    | Set train.val_every={facts.every} checkpoint.every={facts.every}, or checkpoint.keep_best=0
""")


def settings_rows(config: Config) -> Iterator[Row]:
    """Yield (key, whether broken, rule, remedy) of rules on optimizer, data and checkpoints."""
    see = Scope(config, config.mesh)
    for i, beta in enumerate(config.optim.betas):
        yield "optim.betas", not 0 <= beta < 1, f"beta {i + 1} is {beta}, outside [0, 1)", "Set [0.9,0.95]"
    yield from refused(see, _OPTIMIZER)
    yield from _phase_rows(config)
    prompts = isinstance(config.recipe_args, GRPOArgs)  # which observe.samples then names
    yield from refused(see.knowing(prompts=prompts), _DATA)
    yield from _source_rows(config)
    data, date = config.data, config.data.chat.date
    see = see.knowing(
        alpaca=data.is_preference and any(source.chat.format == "alpaca" for _, _, source in sources_of(data)),
        taken=", ".join(sorted(TEMPLATE_NAMES.intersection(data.chat.template_args or ()))),
        dated=date is None or re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d", date),
    )
    yield from refused(see, _CHAT)
    yield from checkpoint_rows(config)


def _phase_rows(config: Config) -> Iterator[Row]:
    see, phases, warmup = Scope(config, config.mesh), config.optim.phases, config.optim.warmup_steps
    steps = sum(phase.steps for phase in phases)
    if phases:
        yield from refused(see.knowing(steps=steps, after=config.train.steps - warmup, total=steps + warmup), _PHASES)
    for number, phase in enumerate(phases, 1):
        rates = phase.lr_ratio, phase.bias_update_rate or 0, phase.mtp_loss_weight or 0
        wrong = phase.steps < 1 or not all(0 <= rate < inf for rate in rates)
        yield from refused(see.knowing(number=number, phase=phase, wrong=wrong), _PHASE)


def _source_rows(config: Config) -> Iterator[Row]:
    data, hf_path, here = config.data, config.model.hf_path, os.getcwd()
    sources = sources_of(data)
    names = [name for name, _, _ in sources]
    known = (*get_args(get_type_hints(DataConfig)["kind"]), *registered_names("data.kind"))
    yield ("data.sources", len(set(names)) < len(names) or (bool(data.sources) and "" in names),
           f"sources are told apart by name, and they are called {', '.join(names)}", "Give each a name: {name: code}")
    for name, weight, source in sources:
        path, kind = source.path, source.kind
        hub = path is not None and (kind == "hub" or source.is_chat and is_data_set(path))
        see = Scope(config, config.mesh).knowing(
            name=name, weight=weight, kind=kind, path=path, here=here, hub=hub,
            weighs=0 < weight < inf,
            kinds="" if kind in known else ", ".join(known),
            mixed=(source.is_chat, source.is_preference) != (data.is_chat, data.is_preference),
            synthetic=source.is_synthetic,
            made=kind.startswith("stdlib") or source.is_synthetic,
            missing=not (path is None or hub or matches(path)),
            parts=", ".join(["split"] * (source.split != "train") + ["subset"] * (source.subset is not None)),
            talks=source.chat != data.chat,
        )  # fmt: skip
        yield from refused(see, _AMONG if data.sources else _ALONE)
    yield ("model.hf_path", hf_path is not None and not local_folder(hf_path).is_dir(),
           f"no such directory (looked from {here})",
           "Name a directory with config.json and *.safetensors, or a Hub id (OWNER/NAME@main), or set null")


def checkpoint_rows(config: Config) -> Iterator[Row]:
    """Yield a row for each rule that ``config`` breaks on resuming from and keeping checkpoints.

    A row is (configuration key, True, rule, remedy): True says that the rule is broken; rule and
    remedy are sentences.
    """
    resume, every, val_every = config.checkpoint.resume, config.checkpoint.every, config.train.val_every
    see = Scope(config, config.mesh).knowing(
        here=os.getcwd(),
        gone=resume not in ("auto", "never") and not Path(resume).expanduser().is_dir(),
        unvalidated=not every or not val_every or every % val_every,
        every=every or 100,
    )
    yield from refused(see, _CHECKPOINT)
