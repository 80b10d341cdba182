"""Checkpoints: finding them by name, checking and reading safetensors and GGUF files."""
