"""Other libraries' ways to call attention, under jattn's contract."""

from jattn.interop.flax import flax_attention_fn

__all__ = ["flax_attention_fn"]
