"""Rollouts step by step, and the guard that takes canaries out."""
