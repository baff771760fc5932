"""The Hugging Face models of a plan; nothing is imported here, to keep `import headwise` light."""
