"""Reinforcement learning with group-relative rewards: the loop, top to bottom.

Copy it and write your own ``reward``: ``automoe recipe copy grpo``.

    prompts -> engine: answers, log-probabilities, routes -> reward -> advantages within a prompt's group
        -> session: log-probabilities, loss, update -> weights -> engine -> ...

The engine is ``generate`` of transformers in these ranks, or vLLM beside them (``recipe_args``).
Every rank runs this file with the same batch; the session packs it and gives each rank its part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor

from automoe.config.mesh_shape import MeshShape
from automoe.config.recipe_args import GRPOArgs
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.passes.trace import phase
from automoe.rl.batch import Sample
from automoe.rl.engine import Answer, Engine, Sampling, gaps_of
from automoe.rl.engines import open_engine, teacher_of
from automoe.rl.losses import Correction, dapo, distill, group_advantages
from automoe.rl.rollouts import Rollouts
from automoe.rl.routes import MAX_DIFFER
from automoe.rl.session import Session
from automoe.rl.weights import WeightStream
from automoe.run.run import open_run
from automoe.run.samples import stop_tokens
from automoe.run.weights import export_weights
from automoe.training.context import RunContext

# recipe_args.samples, recipe_args.sampler, ...; a copy of this file may declare a dataclass of its own
Args = GRPOArgs


def reward(prompt: str, answer: str, num_tokens: int) -> float:
    """Return an answer's reward: here its number of digits divided by ``num_tokens``, an answer's largest length."""
    return sum(letter in "0123456789" for letter in answer) / num_tokens


def main(config: Config, shape: MeshShape, context: RunContext) -> float | None:
    """Train by GRPO on this rank; return the negative of the last mean reward (for sweeps), None without a step."""
    args: GRPOArgs = config.recipe_args
    train = config.train

    # ---------------------------------------------------------------- policy, reference, engine
    rollouts = Rollouts.open(config, context.run_dir)
    session = Session.open(config, shape, context)
    state, store = session.state, session.store
    state.loader = rollouts
    resumed = store.load_latest(state)
    references = references_of(config, shape, context, session)
    engine = open_engine(config, context)
    most, stops = config.observe.sample_tokens, sorted(stop_tokens(config))
    how = Sampling(args.samples, most, args.temperature, stops=stops)
    stream = WeightStream(state.model_parts, **engine.options)
    loss = distill if args.teacher else dapo
    options = {"correction": Correction("truncate"), "kl_coef": args.kl}

    # ---------------------------------------------------------------- the loop
    updates = args.iterations * args.mini_batches  # of a rollout
    drawn = -1  # the rollout that the names below are of
    mean_reward: float | None = None
    with open_run(config, shape, context, state, store, resumed) as run:
        while state.step < train.steps and not run.stopping:
            run.begin_step()
            rollout, part = divmod(state.step, updates)

            if rollout != drawn:
                began = time.perf_counter()
                with phase("sample", state.step + 1):
                    answers = sample_answers(engine, stream, rollouts, rollout, how, config)
                seconds = time.perf_counter() - began
                texts = [rollouts.tokenizer.decode(a.without_stop(stops)) for _, a in answers]
                prompts = [rollouts.texts[number] for number, _ in answers]

                # their rewards, and what trainer, teacher and reference say of them
                rewards = [reward(*pair, most) for pair in zip(prompts, texts, strict=True)]
                mean_reward = rollouts.judged(rewards)
                scores = scores_of(answers, session, references, rollouts, rollout, args)
                gaps = gaps_of([answer for _, answer in answers], scores, args.max_gap)
                advantages = group_advantages(rewards, args.samples)
                if args.teacher:  # the mean distance to it, a baseline of the tokens' own
                    names = "old_log_probs", "teacher_log_probs"
                    ours, theirs = (list(chain(*scores[name])) for name in names)
                    advantages = [(sum(ours) - sum(theirs)) / len(ours)] * len(answers)
                batch = samples_of(answers, rollouts, args, advantages=advantages, **scores)
                drawn = rollout

            # one update
            with phase("step", state.step + 1):
                samples = rollouts.part(batch, part)
                # After an update the routers may choose otherwise than the engine did.
                session.max_routes_differ = math.inf if part else MAX_DIFFER
                outcome = session.forward_backward(samples, loss, args.temperature, **options)
                update = session.optim_step(report=run.report)

            # record
            record = run.end_step(outcome.stats, update)
            record |= {"rollout": rollout + 1, "update_tokens": outcome.counts.tokens}
            record |= {"reward": mean_reward, **gaps}
            record["answer_tokens"] = sum(len(a.tokens) for _, a in answers) / len(answers)
            if run.validates():
                shown = dict(zip(prompts, texts, strict=True))
                run.show_samples([{"prompt": p, "text": t} for p, t in shown.items()], seconds)
            run.write_or_go_back(record, outcome.stats)

            # save
            if run.saves():
                store.save(state, None, run.stopping)
                rollouts.forget(store.folder)

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


def references_of(
    config: Config, shape: MeshShape, context: RunContext, session: Session
) -> dict[str, Session]:
    """Return the sessions of models that score the answers besides the trained one, by score name.

    ``ref_log_probs`` is by the weights before training: with LoRA, ``session`` without its adapters.
    """
    references = {}
    if config.recipe_args.teacher:
        references["teacher_log_probs"] = Session.open(
            teacher_of(config, context.world_size), shape, context
        )
    if config.recipe_args.kl:
        apart = not config.lora.rank
        references["ref_log_probs"] = Session.open(config, shape, context) if apart else session
    return references


def sample_answers(
    engine: Engine,
    stream: WeightStream,
    rollouts: Rollouts,
    rollout: int,
    how: Sampling,
    config: Config,
) -> list[Numbered]:
    """Return (prompt index, answer) for all answers of a rollout, prompt by prompt. Collective.

    Answers that are not on disk yet are sampled as ``how`` says, after an update of the engine's weights from
    ``stream``.

    Raises:
        BackendError: the engine returns no expert ids, and ``recipe_args.replay`` needs them.
    """
    args = config.recipe_args
    # Of the rollout: a resumed run draws the same.
    how = replace(how, seed=config.train.seed * 1_000_003 + max(1009, args.prompts) * rollout)

    def sample(prompts: list[list[int]]) -> list[list[Answer]]:
        engine.update(stream)
        return engine.sample(prompts, how)

    groups = rollouts.draw(rollout, sample)
    routed = args.replay and config.model.num_moe_layers > 0
    if routed and any(answer.routes is None for group in groups for answer in group):
        raise BackendError(
            "the engine returned no routes. vLLM has them on a CPU, SGLang with --enable-return-routed-experts; else set "
            "recipe_args.replay=false"
        )
    numbers = rollouts.numbers(rollout)
    return [(n, answer) for n, group in zip(numbers, groups, strict=True) for answer in group]


def samples_of(
    answers: Sequence[Numbered], rollouts: Rollouts, args: GRPOArgs, **values: Sequence[Any]
) -> list[Sample]:
    """Return a training sample for each answer, with its prompt, expert ids and log-probabilities.

    ``values``: name -> a further value for each answer, such as its advantage.
    """
    return [
        Sample.of_answer(
            rollouts.prompts[number],
            answer.tokens,
            routes=answer.routes if args.replay else None,
            sampler_log_probs=answer.log_probs,
            **{name: of_all[place] for name, of_all in values.items()},
        )
        for place, (number, answer) in enumerate(answers)
    ]


def scores_of(
    answers: Sequence[Numbered],
    session: Session,
    references: Mapping[str, Session],
    rollouts: Rollouts,
    rollout: int,
    args: GRPOArgs,
) -> dict[str, list[list[Any]]]:
    """Return the log-probabilities of the answers' tokens by trainer, teacher and reference.

    ``answers`` are (prompt index, answer), ``references`` the result of ``references_of``. The result
    has by name one list of token values for each answer: ``old_log_probs`` by the trainer, and one
    name of each of ``references``. With routes, ``differing`` has for each token the first MoE layer
    whose router disagrees with them, or -1. It is stored once for each rollout: later updates, and a
    resumed run, read it.
    """

    def asked() -> dict[str, list[list[Any]]]:
        batch = samples_of(answers, rollouts, args)
        scored = session.log_probs(batch, args.temperature)
        scores = {"old_log_probs": of_answers(scored.log_probs, answers)}
        if scored.first_differing:
            scores["differing"] = of_answers(scored.first_differing, answers)
        for name, scorer in references.items():
            alike = name != "teacher_log_probs"  # in shape, so in routes
            samples = batch if alike else [replace(sample, routes=None) for sample in batch]
            with scorer.adapter_off() if scorer is session else nullcontext():
                scored = scorer.log_probs(samples, args.temperature)
            scores[name] = of_answers(scored.log_probs, answers)
        return scores

    return rollouts.once(rollout, "scores", asked)


def of_answers(scored: Sequence[Tensor], answers: Sequence[Numbered]) -> list[list[float]]:
    """Return for each answer the values of its own tokens: the last entries of its tensor in ``scored``."""
    return [
        values[-len(answer.tokens) :].tolist()
        for values, (_, answer) in zip(scored, answers, strict=True)
    ]
