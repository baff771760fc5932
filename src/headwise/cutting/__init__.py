"""Cut a trained model down to a plan: whitened truncation, refitting, streamed checkpoints."""
