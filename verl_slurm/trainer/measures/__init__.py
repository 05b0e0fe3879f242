"""What a step took, and where its time went."""
