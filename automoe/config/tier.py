"""Who computes the models of a family, and what the trainer asks about that. Needs no torch.

``Tier`` has the answers of automoe's decoder, which computes every family that is a declaration. A
family (``automoe.hf.families.family.Family``) that other code computes overrides them:
``automoe.classes`` is such code, for the classes of ``transformers``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from automoe.config.mesh_shape import MeshShape
from automoe.config.plugins import look_up
from automoe.config.rules import Row
from automoe.config.schema import Config, ModelConfig, MoEConfig


class Tier:
    """Answers about the code that computes a family's models: here those of automoe's decoder.

    A method that returns None leaves the work to the decoder's own function.

    Attributes:
        resizable: False if ``config.json`` at ``model.hf_path`` alone defines the model: no smaller
            one stands for it, and only running its layers tells what they keep.
        repeats_routing: True if choices of experts can be recorded and repeated.
        expert_style: class that shards experts; None: ``automoe.parallel.expert.ExpertStyle``.
    """

    resizable = True
    repeats_routing = True
    expert_style: Any = None

    def rows(self, config: Config, shape: MeshShape) -> Iterable[Row] | None:
        """Return the rules for a model's sizes and for how a mesh shards them."""
        return None

    def adapter_rows(self, config: Config, params: list[Any]) -> Iterable[Row]:
        """Return further rules of ``lora.targets`` for a model with the parameters ``params``."""
        return ()

    def check(self, config: Config) -> None:
        """Raise ``ConfigError``, before ranks start, for what only the built model shows."""

    def params(self, model: ModelConfig, buffers: bool) -> Any:
        """Return the table of parameters in the model's order, with saved buffers if ``buffers``.

        It is a list of ``automoe.model.param_spec.Param``.
        """
        return None

    def build(self, model: ModelConfig, moe: MoEConfig, backend: Any) -> Any:
        """Return the model on the meta device, with parameters of torch's default dtype.

        It is a ``automoe.model.causal_lm.CausalLM``.
        """
        return None

    def layer_bytes(self, config: Config, ep: int, expert_rows: float) -> Any:
        """Return the bytes that the layers keep of a micro-batch, or why they cannot be counted.

        Args:
            ep: ranks that hold equal parts of the experts.
            expert_rows: rows that reach the experts of a rank.

        Returns:
            What a micro-batch keeps once, such as masks; and of each layer what it keeps, and the
            most that its backward pass needs beyond what this and earlier layers kept. Or a text.
        """
        return None

    def computes_in_float32(self, model: ModelConfig) -> bool:
        """Return whether a part computes in float32 when parameters have float64."""
        return False


def tier_of(model: ModelConfig) -> Tier:
    """Return the family of ``model`` if it is a plugin's, or the decoder's answers."""
    return look_up("model.family", model.family) or Tier()
