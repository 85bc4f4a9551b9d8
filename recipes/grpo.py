"""Reinforcement learning with group-relative rewards: the loop, top to bottom.

Copy it and write your own ``reward``: ``automoe recipe copy grpo``.

    prompts -> engine: answers, log-probabilities, routes -> reward -> advantages within a prompt's group
        -> session: log-probabilities, loss, update -> weights -> engine -> ...

The engine is ``generate`` of transformers in these ranks, or vLLM beside them (``recipe_args``).
Every rank runs this file with the same batch; the session packs it and gives each rank its part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

from automoe.comm.trace import phase
from automoe.config.mesh_shape import MeshShape
from automoe.config.recipe_args import GRPOArgs
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.rl.batch import Sample
from automoe.rl.engine import Answer, Engine, check_gap
from automoe.rl.engines import open_engine
from automoe.rl.losses import Correction, dapo, group_advantages
from automoe.rl.rollouts import Rollouts
from automoe.rl.session import Session
from automoe.rl.weights import WeightStream
from automoe.run.run import open_run
from automoe.run.samples import stop_tokens
from automoe.run.weights import export_weights
from automoe.training.context import RunContext

# recipe_args.samples, recipe_args.sampler, ...; a copy of this file may declare a dataclass of its own
Args = GRPOArgs


def reward(prompt: str, answer: str, num_tokens: int) -> float:
    """Return the reward of an answer: here the share of digits, of at most ``num_tokens`` tokens."""
    return sum(letter in "0123456789" for letter in answer) / num_tokens


def main(config: Config, shape: MeshShape, context: RunContext) -> float | None:
    """Train ``config`` on this rank; return the last mean reward, negated as an objective."""
    args: GRPOArgs = config.recipe_args
    train = config.train

    # ---------------------------------------------------------------- policy, reference, engine
    rollouts = Rollouts.open(config, context.run_dir)
    session = Session.open(config, shape, context)
    state, store = session.state, session.store
    state.loader = rollouts
    resumed = store.load_latest(state)
    # The weights that training began with are a session of their own, or this one without adapters.
    apart = args.kl > 0 and not config.lora.rank
    reference = Session.open(config, shape, context) if apart else session
    engine = open_engine(config, stop_tokens(config), context)
    stream = WeightStream(state.model_parts, **engine.options)

    # ---------------------------------------------------------------- the loop
    mean_reward: float | None = None
    with open_run(config, shape, context, state, store, resumed) as run:
        while state.step < train.steps and not run.stopping:
            run.begin_step()

            # answers of the weights as they are now, and their rewards
            began = time.perf_counter()
            with phase("sample", state.step + 1):
                engine.update(stream)
                answers = sampled(engine, rollouts, state.step, config)
            seconds = time.perf_counter() - began
            texts = [rollouts.tokenizer.decode(answer.tokens) for _, answer in answers]
            prompts = [rollouts.texts[number] for number, _ in answers]
            rewards = list(
                map(partial(reward, num_tokens=config.observe.sample_tokens), prompts, texts)
            )
            mean_reward = sum(rewards) / len(rewards)

            # what the trainer says of the answers, before the update and when training began
            batch = samples_of(answers, group_advantages(rewards, args.samples), rollouts, args)
            old = session.log_probs(batch, args.temperature).log_probs
            gaps = check_gap(*both_say(answers, old), args.max_gap)
            batch = with_values(batch, "old_log_probs", old)
            if args.kl:
                with reference.adapter_off() if reference is session else nullcontext():
                    first = reference.log_probs(batch, args.temperature).log_probs
                batch = with_values(batch, "ref_log_probs", first)

            # one update
            with phase("step", state.step + 1):
                options = {"correction": Correction("truncate"), "kl_coef": args.kl}
                outcome = session.forward_backward(batch, dapo, args.temperature, **options)
                update = session.optim_step(report=run.report)

            # record
            record = run.end_step(outcome.stats, update)
            record |= {"reward": mean_reward, "engine_gap": gaps[0], "engine_gap_max": gaps[1]}
            record["answer_tokens"] = sum(len(a.tokens) for _, a in answers) / len(answers)
            if run.validates():
                shown = dict(zip(prompts, texts, strict=True))
                run.show_samples([{"prompt": p, "text": t} for p, t in shown.items()], seconds)
            run.write(record, outcome.stats)

            # save
            if run.saves():
                store.save(state, None, run.stopping)
                rollouts.forget(state.step)

        # ------------------------------------------------------------ leave
        exports = config.checkpoint.export_hf
        context.preempted = state.step < train.steps or (run.stopping and exports)
        run.check_result()
        paths = {}
        if exports and not run.stopping:
            written = export_weights(config, state.model_parts, context.run_dir, state.optimizer)
            paths["HF checkpoint"] = written
        run.finish(paths)
    return None if mean_reward is None else -mean_reward


Numbered = tuple[int, Answer]  # the number of a prompt, and an answer to it


def sampled(engine: Engine, rollouts: Rollouts, step: int, config: Config) -> list[Numbered]:
    """Return the answers of a step, those to one prompt after the other."""
    args = config.recipe_args
    seed = config.train.seed * 1_000_003 + 1009 * step  # of the step: a resumed run draws the same
    groups = rollouts.draw(
        step,
        lambda prompts: engine.sample(
            prompts, args.samples, config.observe.sample_tokens, args.temperature, seed
        ),
    )
    routed = args.replay and config.model.num_moe_layers > 0
    if routed and any(answer.routes is None for group in groups for answer in group):
        raise BackendError(
            "the engine returned no routes. Start SGLang with --enable-return-routed-experts, or set "
            "recipe_args.replay=false"
        )
    numbers = rollouts.of_step(step)
    return [(n, answer) for n, group in zip(numbers, groups, strict=True) for answer in group]


def samples_of(
    answers: Sequence[Numbered], advantages: Sequence[float], rollouts: Rollouts, args: GRPOArgs
) -> list[Sample]:
    """Return the training samples of answers, with the engine's log-probabilities and routes."""
    return [
        Sample.of_answer(
            rollouts.prompts[number],
            answer.tokens,
            routes=answer.routes if args.replay else None,
            sampler_log_probs=answer.log_probs,
            advantages=advantage,
        )
        for (number, answer), advantage in zip(answers, advantages, strict=True)
    ]


def with_values(batch: Sequence[Sample], name: str, values: Sequence[Tensor]) -> list[Sample]:
    """Return the batch with a further value of every token."""
    return [
        replace(sample, values={**sample.values, name: value})
        for sample, value in zip(batch, values, strict=True)
    ]


def both_say(
    answers: Sequence[Numbered], trainer: Sequence[Tensor]
) -> tuple[list[float], list[float]]:
    """Return the log-probabilities of all answers' tokens, by the engine and by the trainer."""
    theirs = [number for _, answer in answers for number in answer.log_probs]
    ours = [
        number
        for (_, answer), values in zip(answers, trainer, strict=True)
        for number in values[-len(answer.tokens) :].tolist()
    ]
    return theirs, ours
