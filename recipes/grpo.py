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
from dataclasses import replace

import torch

from automoe.config.mesh_shape import MeshShape
from automoe.config.recipe_args import GRPOArgs
from automoe.config.schema import Config
from automoe.rl.batch import Sample
from automoe.rl.engine import Answer, check_gap, open_engine
from automoe.rl.losses import Correction, dapo, group_advantages
from automoe.rl.rollouts import Rollouts
from automoe.rl.session import Session
from automoe.rl.weights import WeightStream
from automoe.comm.trace import phase
from automoe.training.context import RunContext
from automoe.run.run import open_run
from automoe.run.samples import stop_tokens
from automoe.run.weights import export_weights

# recipe_args.samples, recipe_args.sampler, ...; a copy of this file may declare a dataclass of its own
Args = GRPOArgs


def reward(prompt: str, answer: str, num_tokens: int) -> float:
    """Return the reward of an answer: here the share of digits, of at most ``num_tokens`` tokens."""
    return sum(letter in "0123456789" for letter in answer) / num_tokens


def main(config: Config, shape: MeshShape, context: RunContext) -> float | None:
    """Train ``config`` on this rank; return the last mean reward, negated as an objective."""
    train = config.train
    args: GRPOArgs = config.recipe_args
    length = config.observe.sample_tokens

    # ---------------------------------------------------------------- prompts, policy, reference
    rollouts = Rollouts.open(config, context.run_dir)
    texts, prompts = rollouts.texts, rollouts.prompts
    session = Session.open(config, shape, context)
    session.state.loader = rollouts
    resumed = session.store.load_latest(session.state)
    # The weights that training began with: another model, or this one without its adapters.
    reference = Session.open(config, shape, context) if args.kl and not config.lora.rank else None

    # ---------------------------------------------------------------- engine
    engine = open_engine(config, stop_tokens(config), context)
    stream = WeightStream(session.state.model_parts, **engine.options)

    # ---------------------------------------------------------------- the loop
    mean_reward = 0.0
    with open_run(config, shape, context, session.state, session.store, resumed) as run:
        while session.state.step < train.steps and not run.stopping:
            step = session.state.step
            run.begin_step()

            # answers of the weights as they are now
            began = time.perf_counter()
            with phase("sample", step + 1):
                engine.update(stream)
                groups = rollouts.draw(
                    step,
                    lambda asked, seed=train.seed * 1_000_003 + 1009 * step: engine.sample(
                        asked, args.samples, length, args.temperature, seed
                    ),
                )
            sampled_s = time.perf_counter() - began
            numbers = rollouts.of_step(step)
            pairs = [(n, answer) for n, group in zip(numbers, groups, strict=True) for answer in group]
            answers = [rollouts.tokenizer.decode(answer.tokens) for _, answer in pairs]
            rewards = [reward(texts[n], text, length) for (n, _), text in zip(pairs, answers, strict=True)]
            advantages = group_advantages(rewards, args.samples)

            # what the trainer says of them, and the weights that training began with
            batch = [
                sample_of(prompts[n], answer, args, advantages=advantage)
                for (n, answer), advantage in zip(pairs, advantages, strict=True)
            ]
            old = session.log_probs(batch, args.temperature).log_probs
            engine_says = [p for _, answer in pairs for p in answer.log_probs]
            trainer_says = answer_values(old, batch)
            gap, largest_gap = check_gap(engine_says, trainer_says, args.max_gap)
            batch = with_values(batch, old_log_probs=old)
            if args.kl:
                if reference is not None:
                    first = reference.log_probs(batch, args.temperature).log_probs
                else:
                    with session.adapter_off():
                        first = session.log_probs(batch, args.temperature).log_probs
                batch = with_values(batch, ref_log_probs=first)

            # one update
            with phase("step", step + 1):
                outcome = session.forward_backward(
                    batch,
                    dapo,
                    args.temperature,
                    correction=Correction("truncate"),
                    kl_coef=args.kl,
                )
                update = session.optim_step(report=run.report)

            # record
            mean_reward = sum(rewards) / len(rewards)
            record = run.end_step(outcome.stats, update) | {
                "reward": mean_reward,
                "answer_tokens": len(engine_says) / len(pairs),
                "engine_gap": gap,
                "engine_gap_max": largest_gap,
            }
            if run.validates():
                shown = {texts[n]: text for (n, _), text in zip(pairs, answers, strict=True)}
                run.show_samples([{"prompt": p, "text": t} for p, t in shown.items()], sampled_s)
            run.write(record, outcome.stats)

            # save
            if run.saves():
                session.store.save(session.state, None, run.stopping)
                rollouts.forget(session.state.step)

        # ------------------------------------------------------------ leave
        exports = config.checkpoint.export_hf
        paths = {}
        context.preempted = session.state.step < train.steps or (run.stopping and exports)
        run.check_result()
        if exports and not run.stopping:
            paths["HF checkpoint"] = export_weights(
                config, session.state.model_parts, context.run_dir, session.state.optimizer
            )
        run.finish(paths)
    return -mean_reward


def sample_of(prompt: list[int], answer: Answer, args: GRPOArgs, **values: float) -> Sample:
    """Return the training sample of an answer, with the engine's log-probabilities and routes."""
    return Sample.of_answer(
        prompt,
        answer.tokens,
        routes=answer.routes if args.replay else None,
        sampler_log_probs=answer.log_probs,
        **values,
    )


def with_values(batch: Sequence[Sample], **values: Sequence[torch.Tensor]) -> list[Sample]:
    """Return the batch with further values of every token, by name and sample."""
    return [
        replace(one, values={**one.values, **{name: each[n] for name, each in values.items()}})
        for n, one in enumerate(batch)
    ]


def answer_values(values: Sequence[torch.Tensor], batch: Sequence[Sample]) -> list[float]:
    """Return the numbers of the trained tokens of all samples, one after the other."""
    return [
        float(number)
        for each, sample in zip(values, batch, strict=True)
        for number, trained in zip(each, sample.mask, strict=True)
        if trained
    ]
