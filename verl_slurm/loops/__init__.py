"""Other people's training loops: plain PyTorch, Hugging Face, Lightning, verl's SFT and PPO."""
