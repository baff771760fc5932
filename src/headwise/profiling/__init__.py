"""Measurements of a trained model on text, in head space: moments, sensitivities, saturation."""
