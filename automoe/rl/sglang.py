"""SGLang as the engine, at an address."""

from __future__ import annotations

from typing import Any

from automoe.rl.engine import Answer
from automoe.rl.served import ServedEngine


class ServedSGLang(ServedEngine):
    """A server of SGLang."""

    def reload(self) -> None:
        self.post("/pause_generation", mode="retract")
        self.post("/update_weights_from_disk", model_path=str(self.folder), flush_cache=True)
        self.post("/continue_generation")

    def answers(
        self, prompt: list[int], num: int, max_tokens: int, temperature: float, seed: int
    ) -> list[Answer]:
        sampling = {"n": num, "max_new_tokens": max_tokens, "temperature": temperature}
        sampling |= {"sampling_seed": seed, "stop_token_ids": self.stops, "ignore_eos": True}
        found: Any = self.post(
            "/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True
        )
        made = found if isinstance(found, list) else [found]
        said = [one["meta_info"]["output_token_logprobs"] for one in made]
        return [Answer([t for _, t, *_ in one], [p for p, *_ in one]) for one in said]
