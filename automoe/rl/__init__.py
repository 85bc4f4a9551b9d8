"""Reinforcement learning: a training session, its batches and losses, and the inference engines."""
