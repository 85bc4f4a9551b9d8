"""Inference engine that is an SGLang server at an HTTP address."""

from __future__ import annotations

from typing import Any

from automoe.rl.engine import Answer, Sampling
from automoe.rl.routes import read_sglang
from automoe.rl.served import ServedEngine


class ServedSGLang(ServedEngine):
    """Inference engine that is an SGLang server at an HTTP address."""

    def reload(self) -> None:
        self.post("/pause_generation", mode="retract")
        self.post("/update_weights_from_disk", model_path=str(self.folder), flush_cache=True)
        self.post("/continue_generation")

    def answers(self, prompt: list[int], how: Sampling) -> list[Answer]:
        sampling = {"max_new_tokens": how.max_tokens, "temperature": how.temperature}
        sampling |= {"stop_token_ids": how.stops, "ignore_eos": True}
        replies: list[Any] = [
            self.post(
                "/generate",
                input_ids=prompt,
                # One call an answer: those of one call might share the seed.
                sampling_params=sampling | {"sampling_seed": how.seed * how.num + number},
                return_logprob=True,
                return_routed_experts=True,
            )
            for number in range(how.num)
        ]
        return [self._answer(reply["meta_info"], len(prompt)) for reply in replies]

    def _answer(self, meta_info: dict[str, Any], prompt_tokens: int) -> Answer:
        log_probs, tokens, *_ = zip(*meta_info["output_token_logprobs"], strict=True)
        routes = None
        if meta_info.get("routed_experts"):  # of servers with --enable-return-routed-experts
            routes = read_sglang(meta_info, self.model, prompt_tokens + len(tokens))
        return Answer(list(tokens), list(log_probs), routes)
