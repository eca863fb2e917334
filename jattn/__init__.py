"""Attention for JAX that you can trust at the edges and look into in the middle."""

from jattn import biases, masks
from jattn._attention import attend, attention, attention_weights
from jattn._dense import Stats
from jattn._online import merge

__all__ = ["Stats", "attend", "attention", "attention_weights", "biases", "masks", "merge"]
