"""Commands for checkpoints: look, verify, export, keep, and the key that seals them."""
