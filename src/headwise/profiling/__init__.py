"""What a trained model does on text, measured in head space: moments, sensitivities, saturation."""
