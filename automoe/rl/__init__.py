"""Reinforcement learning: a session of a few verbs, its batches, losses, routes and weights."""
