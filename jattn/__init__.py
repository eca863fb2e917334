"""Attention for JAX that you can trust at the edges and look into in the middle.

    attention, attend               with heads and batches; of one head
    masks, biases                   what they are given: rules, or arrays
    attention_weights, trace        the weights; every number of one head
    explore, pictures               a page to try them in; figures
    Cache, cached_attention         decoding
    MultiHead, multihead            a layer
    rotary                          positions for queries and keys
    merge, ring                     attention over parts of the keys; over devices
    softmax, logsumexp, entropy     of one row, with a mask
    dot_product_attention, interop  in the place of jax.nn's; flax and equinox
    testing                         whether a model sees what it must not
"""

from jattn import biases, masks, pictures, ring, testing
from jattn._attention import attend, attention, attention_weights
from jattn._cache import Cache, cached_attention
from jattn._multihead import MultiHead, init_multihead, multihead
from jattn._online import merge
from jattn._rotary import rotary
from jattn._rows import entropy, log_softmax, logsumexp, naive_softmax, rows_normalised, softmax
from jattn._tile import Stats
from jattn._trace import Trace, trace
from jattn.explore import Explorer, explore
from jattn.interop.jax_nn import dot_product_attention

__all__ = [
    "Cache",
    "Explorer",
    "MultiHead",
    "Stats",
    "Trace",
    "attend",
    "attention",
    "attention_weights",
    "biases",
    "cached_attention",
    "dot_product_attention",
    "entropy",
    "explore",
    "init_multihead",
    "log_softmax",
    "logsumexp",
    "masks",
    "merge",
    "multihead",
    "naive_softmax",
    "pictures",
    "ring",
    "rotary",
    "rows_normalised",
    "softmax",
    "testing",
    "trace",
]
