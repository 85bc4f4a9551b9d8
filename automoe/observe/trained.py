"""Description of what a run trains and what it freezes."""

from __future__ import annotations

from automoe.config.schema import Config
from automoe.model.params import model_params
from automoe.model.trainable import with_adapters


def describe_training(config: Config) -> list[str]:
    """Return lines that say which parameters are trained or frozen; [] if all are trained."""
    model = config.model
    lora = config.lora
    if not (lora.rank or config.train.freeze):
        return []
    originals = model_params(model)
    params = with_adapters(originals, config)
    trained = sum(param.numel for param in params if param.trained)
    total = sum(param.numel for param in originals)
    how = f"frozen: {', '.join(config.train.freeze)}"
    of = "of"
    if lora.rank:
        how = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"
        of = "beside"
    lines = [
        f"{how}: trains {trained:,} numbers {of} the model's {total:,} ({trained / total:.2%})"
    ]
    routers = [param for param in params if param.part == "router"]
    if routers:
        moving = [param for param in routers if param.trained]
        state = "trained in part" if moving else "frozen"
        if len(moving) == len(routers):
            state = "trained"
        biases = ", and expert biases with them" if model.router.expert_bias else ""
        coefs = ", ".join(
            f"moe.{name}={value:g}"
            for name, value in vars(config.moe).items()
            if name.endswith("_coef") and value
        )
        losses = f"balance losses are on ({coefs})" if coefs else "balance losses are off"
        lines.append(f"routers are {state}{biases}; {losses}")
    return lines
