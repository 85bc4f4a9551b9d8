"""vLLM in a child process, in another Python environment, which has vLLM and not automoe.

The parent writes lines of JSON to standard input. This process answers each with a line of JSON on
the file descriptor whose number is the environment variable ``FD``; its first line is "ready":

    {"do": "sample", "prompts": [[ids]], "num": N, "max_tokens": A, "temperature": T, "seed": S, "stops": [ids]}
        -> for each prompt a list of N answers: [ids, their log-probabilities, expert ids or null]
    {"do": "update"} -> "waiting"
    {"file": PATH}, a safetensors file with the next weights, for each bucket -> "taken"
    {"file": null} -> "updated"

Expert ids are [tokens of prompt and answer without the last, MoE layers, K].
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any


def forget_kernels(model: Any) -> None:
    """Drop the MoE kernels of a vLLM ``model``, so that vLLM rebuilds them with the next weights.

    On a CPU these kernels repack the expert weights once, when they are built. If they stayed,
    weights from ``reload_weights`` would not be repacked, and the results would be wrong.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            module.routed_experts.quant_method.moe_kernel = None


class Routes:
    """Recorder of the expert ids of each token; vLLM on a CPU does not return them itself.

    It hooks two parts of vLLM: the routers, for the ids that a forward pass chooses, and the model
    runner, for the request and position of each token in that pass.
    """

    def __init__(self, llm: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        layers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        chosen: dict[int, Any] = {}  # layer -> [tokens of a pass, K]
        self._seen: dict[str, Any] = {}  # request -> position -> [L, K]
        for layer in layers:
            layer.router.set_capture_fn(
                lambda ids, at=layer.layer_id: chosen.update({at: ids.tolist()})
            )
        run = runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **options: Any) -> Any:
            chosen.clear()
            output = run(scheduled, *args, **options)
            if chosen:
                lines = zip(*(chosen[layer.layer_id] for layer in layers), strict=True)
                batch = runner.input_batch
                for request, start in zip(
                    batch.req_ids, batch.num_computed_tokens_cpu, strict=False
                ):
                    seen = self._seen.setdefault(request.split("-")[0], {})
                    for position in range(scheduled.num_scheduled_tokens[request]):
                        seen[int(start) + position] = next(lines)
            return output

        runner.execute_model = execute_model

    def take(self, request: str, num_tokens: int) -> list[Any] | None:
        """Return, and remove from the recorder, the expert ids of a finished request's first tokens.

        Args:
            request: id of the request in vLLM.
            num_tokens: number of tokens of prompt and answer, without the last.

        Returns:
            [num_tokens, L, K] ids for L MoE layers and top-k K; None for a model without experts.
        """
        seen = self._seen.pop(request.split("-")[0], None)
        return seen and [seen[position] for position in range(num_tokens)]


def main(folder: str, dtype: str, max_model_len: str) -> None:
    sys.path.pop(0)  # this folder, whose names are those of other packages
    import torch
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    reply = os.fdopen(int(os.environ["FD"]), "w")
    on_cpu = not torch.cuda.is_available()
    llm = LLM(
        model=folder,
        dtype=dtype,
        load_format="dummy",  # the first update brings weights
        skip_tokenizer_init=True,
        enforce_eager=on_cpu,
        max_model_len=int(max_model_len),
        # A cache may hold what older weights made of a prompt.
        enable_prefix_caching=False,
        # Of the distribution that tokens are drawn from, after the temperature.
        logprobs_mode="processed_logprobs",
        # The CPU kernel rotates queries of three dims wrongly (multi-head latent attention).
        compilation_config={"custom_ops": ["-rotary_embedding"]} if on_cpu else {},
        # The kernel for latent attention that vLLM prefers on CPUs with AMX refuses float32.
        attention_config={"backend": "CPU_MLA"} if on_cpu else {},
    )

    def send(content: Any) -> None:
        print(json.dumps(content), file=reply, flush=True)

    def buckets() -> Iterator[tuple[str, torch.Tensor]]:
        while file := json.loads(sys.stdin.readline())["file"]:
            tensors = load_file(file)
            send("taken")  # the next bucket is another file, written while this one is loaded
            for name, tensor in tensors.items():
                if name in sinks:
                    sinks[name].copy_(tensor)
                elif sinks and ".experts." in name:
                    for number, each in enumerate(tensor):
                        yield name.replace(".experts.", f".experts.{number}."), each
                else:
                    yield name, tensor

    def sinks_of(model: Any) -> dict[str, torch.Tensor]:
        return {
            name.replace(".attn.", ".self_attn."): parameter.data
            for name, parameter in model.named_parameters()
            if name.endswith(".sinks")
        }

    # vLLM copies GPT-OSS's sinks and stacks of experts past its reload, into tensors that it drops.
    [sinks] = llm.apply_model(sinks_of)
    routes = Routes(llm) if on_cpu else None
    send("ready")
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["do"] == "update":
            send("waiting")
            if on_cpu:
                llm.apply_model(forget_kernels)
            # All tensors in one call: vLLM finishes a layer when it has every tensor of it.
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": buckets()})
            send("updated")
            continue
        options = {"temperature": ask["temperature"], "max_tokens": ask["max_tokens"]}
        options |= {"stop_token_ids": ask["stops"], "ignore_eos": True, "logprobs": 0}
        prompts, settings = [], []
        for number, prompt in enumerate(ask["prompts"]):
            for answer in range(ask["num"]):
                prompts.append({"prompt_token_ids": prompt})
                seed = (ask["seed"] + number) * ask["num"] + answer
                settings.append(SamplingParams(seed=seed, **options))
        groups: list[Any] = [[] for _ in ask["prompts"]]
        for number, request in enumerate(llm.generate(prompts, settings, use_tqdm=False)):
            [answer] = request.outputs
            tokens = answer.token_ids
            said = [p[t].logprob for t, p in zip(tokens, answer.logprobs, strict=True)]
            most = len(request.prompt_token_ids) + len(tokens) - 1
            taken = routes and routes.take(request.request_id, most)
            groups[number // ask["num"]].append((tokens, said, taken))
        send(groups)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    main(*sys.argv[1:])
