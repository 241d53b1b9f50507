"""Checkpoints: Hugging Face folders in and out, GGUF conversion, training state. Alone knows tensor names."""
