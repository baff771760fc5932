"""What a model does, as numbers."""
