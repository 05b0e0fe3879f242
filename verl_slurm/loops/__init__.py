"""Training loops that are not ours: plain PyTorch, Hugging Face, Lightning, verl's SFT and PPO."""
