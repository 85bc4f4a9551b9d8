"""Tokens per CPU second and memory of a GRPO training step on one core, ours and TRL's ``GRPOTrainer``, same rollouts.

Nothing is sampled: both get the same prompts, answers and rewards. A rollout is old log-probabilities and two updates
(loss, backward, clipping, AdamW) over 64 answers, in float32, one process and one thread; its first step is the first update
with them. The two take turns, update by update, and losses and gradient norms must be equal, else nothing is reported. Both
have micro-batches of 8 rows; TRL has grouped_mm, no checkpointing, ``num_iterations=2`` (it computes old log-probabilities
only then, in a pass of their own; ours are those of the first update's pass: ``losses.on_policy``). Of its time only the
parts named above count, of ours the whole calls of the session. Peak memory is of processes of their own.

    python benchmarks/grpo_step.py             # about six minutes; writes benchmarks/results/grpo_step.json
    python benchmarks/grpo_step.py --quick     # a small model, to check the script itself
    python benchmarks/grpo_step.py --vllm PYTHON   # new weights into vLLM 0.32 for CPUs; results/grpo_vllm_weights.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import commit, cpu_model, memory, result_file

PROMPT, ANSWER, GROUP, ANSWERS, VOCAB = 16, 128, 8, 64, 512
LR = 1e-4
GATE = 1e-3  # relative difference of gradient norms, and difference of losses over the norm, that are accepted
UNTIMED = 1  # generations
PARTS = ("old log-probabilities", "forward", "backward", "clip", "optimizer")
# vLLM that reads its weights from each folder that is named, and answers when an empty line comes.
RELOADS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from vllm_worker import forget_kernels
sys.path.pop(0)
import vllm
llm = vllm.LLM(model=sys.argv[2], dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=144,
               enable_prefix_caching=False)
for line in sys.stdin:
    if line.strip():
        llm.apply_model(forget_kernels)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": line.strip()})
        print("[]", flush=True)
        continue
    asked = {"prompt_token_ids": list(range(3, 19))}
    [request] = llm.generate([asked], vllm.SamplingParams(seed=0, max_tokens=1, logprobs=0, detokenize=False), use_tqdm=False)
    [token], [log_probs] = request.outputs[0].token_ids, request.outputs[0].logprobs
    print(json.dumps([vllm.__version__, token, log_probs[token].logprob]), flush=True)
"""


def rollouts(answers: str) -> dict[str, list[Any]]:
    """Prompts, answers and rewards; ``answers`` is uniform (1 to 128 tokens) or full (all 128 long)."""
    draw = random.Random(1)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(ANSWERS // GROUP)]
    lengths = [ANSWER if answers == "full" else draw.randint(1, ANSWER) for _ in range(ANSWERS)]
    return {
        "prompts": [prompt for prompt in prompts for _ in range(GROUP)],
        "answers": [[draw.randrange(3, VOCAB) for _ in range(length - 1)] + [1] for length in lengths],
        "rewards": [draw.random() for _ in range(ANSWERS)],
    }


def save_model(folder: Path, hidden: int, layers: int) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=2,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


class Ours:
    """A session that trains on the rollouts; ``update`` is one update, with old log-probabilities if they are due."""

    def __init__(self, folder: Path, drawn: dict[str, list[Any]], micro_batch: int, samples: int = ANSWERS) -> None:
        from automoe.session import Sample, losses, open_session

        row = PROMPT + ANSWER
        self.session = open_session(
            [
                *(f"model.hf_path={folder}", f"run_dir={folder.parent}/run", "mesh.pp=1", "mesh.ep=1"),
                *(f"train.seq_len={row}", f"train.micro_batch_size={micro_batch}", "train.global_batch_size=64"),
                *("train.dtype=float32", "train.grad_clip=1.0", "optim.betas=[0.9,0.999]", "optim.eps=1e-8"),
                *(
                    "optim.weight_decay=0.0",
                    "launch.device=cpu",
                    "launch.threads_per_rank=1",
                    "parallel.expert_wgrad=fused",
                ),
            ]
        )
        self.of_update = {True: losses.on_policy(losses.dapo), False: losses.dapo}
        advantages = losses.group_advantages(drawn["rewards"], GROUP)
        self.batch = [
            lambda old, p=p, a=a, x=x: Sample.of_answer(
                p, a, advantages=x, **({} if old is None else {"old_log_probs": old[len(p) :]})
            )
            for p, a, x in zip(drawn["prompts"], drawn["answers"], advantages, strict=True)
        ]
        self.seconds: dict[str, list[float]] = {"first update": [], "second update": []}
        self.losses: list[float] = []
        self.norms: list[float] = []

    def update(self, draws: bool) -> None:
        start = time.process_time()
        old = [None] * len(self.batch) if draws else self.old
        samples = [make(known) for make, known in zip(self.batch, old, strict=True)]
        outcome = self.session.forward_backward(samples, self.of_update[draws], clip_low=0.2, clip_high=0.2)
        update = self.session.optim_step(lr=LR)
        if draws:
            self.old = outcome.log_probs
        self.seconds["first update" if draws else "second update"].append(time.process_time() - start)
        self.losses.append(outcome.loss)
        self.norms.append(update.grad_norm)


class Theirs:
    """TRL's trainer over the rollouts; ``after`` is called after each update, with whether old log-probabilities were due."""

    def __init__(
        self, folder: Path, drawn: dict[str, list[Any]], generations: int, after: Callable[[bool], None]
    ) -> None:
        import transformers
        import trl
        from datasets import Dataset

        words = {"<unk>": 0, "</s>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        numbers: list[int] = []

        def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
            seen: dict[int, int] = {}
            numbers.clear()
            for group in map(int, prompts):
                numbers.append(group * GROUP + seen.setdefault(group, 0))
                seen[group] += 1
            answers = [drawn["answers"][n] for n in numbers]
            no_log_probs = [[0.0] * len(answer) for answer in answers]
            return {
                "prompt_ids": [drawn["prompts"][n] for n in numbers],
                "completion_ids": answers,
                "logprobs": no_log_probs,
            }

        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="grouped_mm"
        )
        args = trl.GRPOConfig(
            output_dir=str(folder.parent / "trl"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            learning_rate=LR,
            lr_scheduler_type="constant",
            num_generations=GROUP,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=ANSWERS // 8,
            num_iterations=2,
            max_steps=2 * generations,
            max_completion_length=ANSWER,
            gradient_checkpointing=False,
            router_aux_loss_coef=0.0,
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            shuffle_dataset=False,
            loss_type="dapo",
        )
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.trainer = trainer = trl.GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [drawn["rewards"][n] for n in numbers],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(ANSWERS // GROUP)]),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="<pad>"
            ),
            rollout_func=sample,
        )
        self._time(trainer, "_get_per_token_logps_and_entropies", lambda: PARTS[torch.is_grad_enabled()])
        self._time(trainer.accelerator, "backward", lambda: "backward")
        self._time(trainer.accelerator, "clip_grad_norm_", lambda: "clip")
        self._spent = dict.fromkeys(PARTS, 0.0)
        of_update = self

        class Turns(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                self.began = time.process_time()

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                of_update._spent["optimizer"] += time.process_time() - self.began

            def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
                if "grad_norm" in logs:
                    of_update.losses.append(float(logs["loss"]))
                    of_update.norms.append(float(logs["grad_norm"]))

            def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
                for part, seconds in of_update._spent.items():
                    of_update.seconds[part].append(seconds)
                of_update._spent = dict.fromkeys(PARTS, 0.0)
                after(state.global_step % 2 == 1)

        trainer.add_callback(Turns())

    def _time(self, owner: Any, name: str, part: Callable[[], str]) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            start = time.process_time()
            result = inner(*args, **named)
            self._spent[part()] += time.process_time() - start
            return result

        setattr(owner, name, timed)


def measure_memory(who: str, folder: Path, answers: str, micro_batch: int) -> None:
    """Print the peak above the loaded model of two generations; the first one is a warm-up."""
    drawn = rollouts(answers)
    base = [0.0]

    updates: list[bool] = []

    def warmed_up(draws: bool) -> None:
        updates.append(draws)
        if len(updates) == 2:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    if who == "trl":
        theirs = Theirs(folder, drawn, 2, warmed_up)
        base[0] = memory("VmRSS")
        theirs.trainer.train()
    else:
        ours = Ours(folder, drawn, micro_batch)
        base[0] = memory("VmRSS")
        for draws in (True, False, True, False):
            ours.update(draws)
            warmed_up(draws)
    print(json.dumps({"loaded": base[0], "peak": memory("VmHWM")}))


def measure(folder: Path, answers: str, micro_batch: int, generations: int) -> dict[str, Any]:
    drawn = rollouts(answers)
    ours = Ours(folder, drawn, micro_batch)
    theirs = Theirs(folder, drawn, generations, ours.update)
    theirs.trainer.train()
    from automoe.session import close

    close()
    pairs = list(zip(ours.losses, theirs.losses, ours.norms, theirs.norms, strict=True))
    worst = max(max(abs(a - b), abs(x - y)) / y for a, b, x, y in pairs)
    if worst > GATE:
        raise SystemExit(f"losses or gradient norms differ by {worst:.1e} of the norm; {GATE:.0e} is allowed: {pairs}")
    valid = sum(map(len, drawn["prompts"])) + sum(map(len, drawn["answers"]))
    parts = {part: seconds[2 * UNTIMED :] for part, seconds in theirs.seconds.items()}
    mine = {part: seconds[UNTIMED:] for part, seconds in ours.seconds.items()}
    first, second = ([sum(each) for each in zip(*(of[at::2] for of in parts.values()), strict=True)] for at in (0, 1))
    steps = {"automoe": mine["first update"], "trl": first}
    rollout = ([sum(both) for both in zip(*each, strict=True)] for each in (mine.values(), (first, second)))
    timed = {"step": steps.values(), "second_update": (mine["second update"], second), "rollout": rollout}
    ratios = {name: [b / a for a, b in zip(*both, strict=True)] for name, both in timed.items()}
    return {
        "answers": answers,
        "valid_tokens": valid,
        "largest_difference": worst,
        "losses": {"automoe": ours.losses, "trl": theirs.losses},
        "grad_norms": {"automoe": ours.norms, "trl": theirs.norms},
        "step_seconds": steps,
        "parts": {
            "automoe": {part: median(seconds) for part, seconds in mine.items()},
            "trl": {part: median(seconds[:: 2 if part == PARTS[0] else 1]) for part, seconds in parts.items()},
        },
        "us_per_valid_token": {name: 1e6 * median(seconds) / valid for name, seconds in steps.items()},
        "trl_over_automoe": median(ratios["step"]),
        "trl_over_automoe_range": [min(ratios["step"]), max(ratios["step"])],
        "trl_over_automoe_of": {name: median(each) for name, each in ratios.items()},
    }


def peaks(folder: Path, answers: str, micro_batch: int, tries: int) -> dict[str, Any]:
    """Peak memory above the loaded model in MB, of ``tries`` processes each."""
    seen: dict[str, Any] = {}
    for who in ("automoe", "trl"):
        seen[who] = []
        for _ in range(tries):
            words = [sys.executable, __file__, "--memory", who, "--folder", str(folder), "--answers", answers]
            done = subprocess.run([*words, "--micro", str(micro_batch)], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            line = json.loads(done.stdout.splitlines()[-1])
            seen[who].append(line["peak"] - line["loaded"])
    return seen | {"automoe_over_trl": median(seen["automoe"]) / median(seen["trl"])}


def weights(folder: Path) -> dict[str, Any]:
    """CPU seconds to bring new weights into an engine of this process: streamed, and by a verified export that is loaded."""
    import transformers

    from automoe.hf.write import to_hf
    from automoe.rl.engine import TransformersEngine
    from automoe.rl.weights import WeightStream

    ours = Ours(folder, rollouts("uniform"), 4)
    engine = TransformersEngine(ours.session.config, torch.device("cpu"))
    parts = ours.session.state.model_parts
    stream = WeightStream(parts, **engine.options)
    seconds: dict[str, list[float]] = {"streamed": [], "exported and loaded": []}
    for turn in range(6):
        start = time.process_time()
        engine.update(stream)
        seconds["streamed"].append(time.process_time() - start)
        with TemporaryDirectory() as out:
            start = time.process_time()
            to_hf(parts, Path(out) / "hf")
            loaded = transformers.AutoModelForCausalLM.from_pretrained(Path(out) / "hf", dtype=torch.float32)
            seconds["exported and loaded"].append(time.process_time() - start)
        if turn == 0:
            state = engine._model.state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in loaded.state_dict().items())
    timed = {name: median(values[1:]) for name, values in seconds.items()}
    return timed | {"ratio": timed["exported and loaded"] / timed["streamed"]}


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process, all of its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def into_vllm(python: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Time until vLLM has the trainer's new weights, and its first token: streamed, and by exports that it reads.

    The ways take turns. Each answer's log-probability must be the trainer's.
    """
    from automoe.hf.write import to_hf
    from automoe.rl import vllm
    from automoe.rl.engine import Sampling
    from automoe.rl.weights import WeightStream
    from automoe.session import Sample

    ours = Ours(folder, rollouts("uniform"), 4)
    parts = ours.session.state.model_parts
    prompt, run = list(range(3, 19)), folder.parent / "run"
    streamed = vllm.LocalVLLM(python, ours.session.config, run)
    stream = WeightStream(parts, **streamed.options)
    to_hf(parts, folder.parent / "first")
    command = [python, "-c", RELOADS, str(Path(vllm.vllm_worker.__file__).parent), str(folder.parent / "first")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    others = {key: value for key, value in os.environ.items() if not key.startswith(vllm._OURS)}
    reader = subprocess.Popen(command, env=vllm._BESIDE_TRAINING | others | vllm._CPU, **pipes)

    def say(line: object = "") -> list[Any]:
        print(line, file=reader.stdin, flush=True)
        return next(json.loads(line) for line in reader.stdout if line.startswith(("[]", '["')))

    [version, *_] = say()

    def ask_child() -> tuple[int, float]:
        [[answer]] = streamed.sample([prompt], Sampling(1, 1))
        return answer.tokens[0], answer.log_probs[0]

    def export_and_read(verify: bool) -> None:
        to_hf(parts, folder.parent / "hf", verify=verify, overwrite=True)
        say(folder.parent / "hf")

    ways: dict[str, tuple[Callable[[], None], Callable[[], Any], int]] = {}
    ways["streamed"] = partial(streamed.update, stream), ask_child, streamed._process.pid
    for name, verify in (("verified export", True), ("export that nothing verifies", False)):
        ways[f"{name}, read by vLLM"] = (partial(export_and_read, verify), lambda: say()[1:], reader.pid)
    kinds = [f"{kind} to the {end}" for end in ("last weight", "first token") for kind in ("wall", "cpu")]
    seconds: dict[str, dict[str, list[float]]] = {way: {kind: [] for kind in kinds} for way in ways}
    for turn in range(rounds + 1):
        for way, (load, ask, process) in ways.items():
            with torch.no_grad():
                for part in parts.values():
                    for parameter in part.parameters():
                        parameter.mul_(1.01)
            clocks = time.perf_counter, lambda process=process: time.process_time() + cpu_seconds(process)
            begins = [clock() for clock in clocks]
            load()
            ends = [clock() for clock in clocks]
            token, log_prob = ask()
            ends += [clock() for clock in clocks]
            if turn:  # the first one is a warm-up
                for kind, begin, end in zip(kinds, begins * 2, ends, strict=True):
                    seconds[way][kind].append(end - begin)
            trainers = ours.session.log_probs([Sample.of_answer(prompt, [token])]).log_probs[0][-1]
            if not abs(log_prob - float(trainers)) < 1e-5:
                raise SystemExit(f"{way}: vLLM says {log_prob} of token {token}, the trainer {float(trainers)}")
    streamed.close()
    reader.kill()
    reader.wait()
    medians = {way: {kind: median(each) for kind, each in timed.items()} for way, timed in seconds.items()}
    return {
        "vllm": version,
        "parameters": sum(parameter.numel() for part in parts.values() for parameter in part.parameters()),
        "seconds": seconds,
        "median": medians,
        "over_streamed": {
            way: {kind: medians[way][kind] / best for kind, best in medians["streamed"].items()} for way in ways
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model: checks the script, not speed")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--micro", type=int, default=8, help="our micro-batch, in rows as long as the longest sample")
    parser.add_argument("--generations", type=int, default=8, help="rollouts, each of two updates")
    parser.add_argument("--answers", default="", help="one kind of answers alone: uniform or full")
    parser.add_argument("--vllm", help="the Python of a vLLM: only time new weights into it")
    parser.add_argument("--tries", type=int, default=3, help="processes of each kind that peak memory is measured of")
    parser.add_argument("--no-peaks", action="store_true", help="speed alone")
    parser.add_argument("--memory", choices=["automoe", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    torch.set_num_threads(1)
    if args.memory:
        measure_memory(args.memory, args.folder, args.answers, args.micro)
        return
    machine = {
        "quick": args.quick,
        "commit": commit("../automoe", "grpo_step.py"),
        "cpu": cpu_model(),
        "python": platform.python_version(),
    }
    if args.vllm:
        with TemporaryDirectory() as name:
            save_model(Path(name) / "model", *((256, 2) if args.quick else (512, 7)))
            report = {"what": into_vllm.__doc__.splitlines()[0]} | machine
            report |= into_vllm(args.vllm, Path(name) / "model", 2 if args.quick else 8)
        print(json.dumps([report["median"], report["over_streamed"]], indent=1))
        result_file(args.out, "grpo_vllm_weights", args.quick).write_text(json.dumps(report, indent=1) + "\n")
        return
    sizes = (64, 2) if args.quick else (256, 4)
    report = {
        "what": "a GRPO step on fixed rollouts: old log-probabilities, loss, backward, clipping, AdamW; CPU seconds, one thread",
        **machine,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "micro_batch": {"automoe": args.micro, "trl": 8},
        "runs": [],
    }
    for answers in [args.answers] if args.answers else ["uniform", "full"]:
        with TemporaryDirectory() as name:
            folder = Path(name) / "model"
            save_model(folder, *sizes)
            run = measure(folder, answers, args.micro, 3 if args.quick else args.generations)
            if not args.no_peaks:
                run["peak_mb_above_the_loaded_model"] = peaks(folder, answers, args.micro, args.tries)
            report["runs"].append(run)
            print(
                json.dumps(
                    {k: v for k, v in run.items() if k not in ("losses", "grad_norms", "step_seconds")}, indent=1
                )
            )
    with TemporaryDirectory() as name:
        save_model(Path(name) / "model", *sizes)
        report["weights_into_an_engine_seconds"] = weights(Path(name) / "model")
    result_file(args.out, "grpo_step", args.quick).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
