"""Interface between the trainer and the code that computes a family's models. Needs no torch.

The base class ``Tier`` answers the trainer's questions about a model (rules, parameters, memory)
for automoe's own decoder. Families are subclasses (``automoe.hf.families.family.Family``). Those
whose models are computed by other code override its methods, as ``automoe.classes`` does for model
classes of ``transformers``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from automoe.config.mesh_shape import MeshShape
from automoe.config.plugins import look_up
from automoe.config.rules import Row
from automoe.config.schema import Config, ModelConfig, MoEConfig


class Tier:
    """Base class of model families: what the trainer asks the code that computes a family's models.

    The methods here answer for automoe's own decoder. Families whose models transformers or a
    plugin computes override them; where a method returns None, the trainer does as for the decoder.

    Attributes:
        resizable: True if sizes can be changed; False if ``config.json`` alone defines the model.
        repeats_routing: True if routing (choices of experts) can be recorded and replayed.
        expert_style: makes the ``ParallelStyle`` that shards experts, from the maker of the run's
            dispatchers (``automoe.parallel.dispatchers.Dispatchers``); None: ``ExpertStyle``.
    """

    resizable = True
    repeats_routing = True
    expert_style: Any = None

    def rows(self, config: Config, shape: MeshShape) -> Iterable[Row] | None:
        """Return rules on the model's sizes and sharding, as (key, whether broken, rule, remedy).

        Return None if the rules for automoe's decoder apply.
        """
        return None

    def adapter_rows(self, config: Config, params: list[Any]) -> Iterable[Row]:
        """Return rules on ``lora.targets`` beyond those for every model.

        They are (key, whether broken, rule, remedy).

        Args:
            params: the model's parameters, a list of ``automoe.model.param_spec.Param``.
        """
        return ()

    def check(self, config: Config) -> None:
        """Raise ``ConfigError``, before ranks start, for faults that only building the model shows; here never."""

    def params(self, model: ModelConfig, buffers: bool) -> Any:
        """Return the parameters of ``model`` in order, a list of ``automoe.model.param_spec.Param``.

        Return None, as this base class does, if they are those of automoe's decoder.

        Args:
            buffers: include the buffers that a checkpoint holds.
        """
        return None

    def build(self, model: ModelConfig, moe: MoEConfig, backend: Any) -> Any:
        """Return the family's model, a ``CausalLM`` on the meta device, in torch's default dtype.

        Return None to let automoe's decoder be built.

        Args:
            moe: the ``moe`` section of the configuration.
            backend: ``BackendConfig``, which names the kernels; None for the defaults.
        """
        return None

    def layer_bytes(self, config: Config, ep: int, expert_rows: float) -> Any:
        """Return the bytes of activations that the layers keep for a micro-batch's backward pass.

        Args:
            ep: ranks that the experts are divided over.
            expert_rows: (token, expert) pairs that the experts of a rank compute in a micro-batch.

        Returns:
            (bytes that all layers share, such as masks; a list with a pair for each layer: the
            bytes that it keeps, and the most that its backward pass adds); or a text that says why
            these bytes cannot be counted; or None, if the planner shall take its formulas for
            automoe's decoder.
        """
        return None

    def computes_in_float32(self, model: ModelConfig) -> bool:
        """Return True if some module computes in float32 even if parameters have float64."""
        return False


def tier_of(model: ModelConfig) -> Tier:
    """Return the ``Tier`` of ``model``: the interface of the code that computes the model.

    It is the family's own if transformers or a plugin computes its models, else that of automoe's
    decoder.
    """
    return look_up("model.family", model.family) or Tier()
