#!/usr/bin/env bash
# Trainer multiplies a model's balance loss by gradient_accumulation_steps, and not its cross-entropy.
#
# guess: the same eight samples in one micro-batch and in eight have the same loss and the same pull on the routers, up to
#   the fractions of a micro-batch.
# behaviour: cross-entropies are divided by the tokens of the whole step and added; the balance loss that the model adds to
#   each micro-batch is divided by nothing. With n micro-batches router_aux_loss_coef counts n times, in the reported loss
#   too.
# versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-29):
#   micro-batches   loss without, with coefficient 1: difference   norm of the routers' gradient of the balance loss
#               1          4.166                  5.166        1.001                0.052
#               2          4.166                  6.168        2.002                0.116
#               8          4.166                 12.211        8.045                0.740
# consequence: Who keeps the global batch and takes more accumulation steps, because memory is short or GPUs are fewer, trains
#   with another balance coefficient: routers are pushed to even load 8 or 64 times harder, and the loss curve jumps.
# automoe: a balance loss is a mean over the step's rows or micro-batches, whatever accumulates
#   (tests/moe/test_routing_meshes.py::test_micro_batch_balance_changes_with_accumulation_alone).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0' 'accelerate==1.15.0'
cat > check.py <<'PY'
import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM, PrinterCallback, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1, output_router_logits=True,
)
rows = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]


class PlainTrainer(Trainer):
    def create_optimizer(self, *args, **kwargs):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        return self.optimizer


def one_step(size, micro_batches, coefficient):
    """The step's reported loss, and the gradient of all routers."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, router_aux_loss_coef=coefficient))
    gates = [p for name, p in model.named_parameters() if name.endswith("gate.weight")]
    before = torch.cat([p.detach().clone() for p in gates])
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=size, gradient_accumulation_steps=micro_batches, max_steps=1, max_grad_norm=0,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = PlainTrainer(model=model, train_dataset=data, args=arguments)
    trainer.remove_callback(PrinterCallback)
    loss = trainer.train().training_loss
    return loss, before - torch.cat([p.detach() for p in gates])


print("micro-batches   loss without, with coefficient 1: difference   norm of the routers' gradient of the balance loss")
found = {}
for micro_batches in (1, 2, 8):
    without, gradient = one_step(8 // micro_batches, micro_batches, 0.0)
    with_it, both = one_step(8 // micro_batches, micro_batches, 1.0)
    found[micro_batches] = (without, with_it - without)
    norm = (both - gradient).norm().item()
    print(f"{micro_batches:13}   {without:12.3f} {with_it:22.3f} {with_it - without:12.3f} {norm:20.3f}")
assert abs(found[1][0] - found[8][0]) < 1e-3
assert found[2][1] > 1.9 and found[8][1] > 7.5 and found[1][1] < 1.2
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
