"""The one training loop, its settings, checkpoints and run folders."""
