"""One decoder for the dense Llama, Qwen2 and Qwen3 families, and Hugging Face folders in and out."""

from zerogap.model.checkpoint import CheckpointError, load_decoder, save_decoder
from zerogap.model.config import DecoderConfig, UnsupportedModel
from zerogap.model.decoder import Decoder, WeightMismatch, snapshot_digest

__all__ = [
    "CheckpointError",
    "Decoder",
    "DecoderConfig",
    "UnsupportedModel",
    "WeightMismatch",
    "load_decoder",
    "save_decoder",
    "snapshot_digest",
]
